"""How several ranks train together: token balancing, gradient compression, local SGD, stragglers, and their options.

`setup()` is for ranks that another engine has started.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stoker.launch.joined import setup as setup

__all__ = ["setup"]


def __getattr__(name: str) -> Any:
    if name != "setup":
        raise AttributeError(f"module 'stoker.distributed' has no attribute {name!r}")
    from stoker.launch.joined import setup

    return setup
