"""Makes "ccl" a backend of torch.distributed. Called by torch itself at `import torch`, through the entry point in group
`torch.backends`, so it imports next to nothing and never raises: a script that does not use it must not notice it.
"""

from __future__ import annotations

import contextlib
from typing import Any

__all__ = ["register"]


def register() -> None:
    """Registers the backend "ccl" for CPU tensors, unless somebody else has."""
    with contextlib.suppress(Exception):
        import torch.distributed as dist

        if dist.is_available() and "ccl" not in dist.Backend.backend_list:
            dist.Backend.register_backend("ccl", _create, extended_api=True, devices=["cpu"])


def _create(options: Any, backend_options: Any = None) -> Any:
    from stoker.comm.backend import create

    return create(options)
