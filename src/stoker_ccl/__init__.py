"""Makes "ccl" a backend of torch.distributed in every script, without an import.

torch calls `register` at the end of `import torch`, through the entry point in group `torch.backends`, in every process of the
environment. So this module stands beside the package `stoker`, imports none of it before a group is made with "ccl", and never
raises: if something is broken, it prints one line instead of breaking every script.
"""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["register"]


def register() -> None:
    """Registers the backend "ccl" for CPU tensors, unless it is registered already."""
    try:
        import torch.distributed as dist

        if dist.is_available() and "ccl" not in dist.Backend.backend_list:
            dist.Backend.register_backend("ccl", _create, extended_api=True, devices=["cpu"])
    except Exception as error:
        print(
            f"stoker ccl: the backend is not registered: {type(error).__name__}: {error}", file=sys.stderr, flush=True
        )


def _create(options: Any, backend_options: Any = None) -> Any:
    from stoker.comm.process_group import create
    from stoker.requires import require

    require("ccl")
    return create(options)
