"""`--memory-allocator`: replaces malloc by another library through LD_PRELOAD. This is optional: stoker.optimize keeps memory
mapped by itself.
"""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Mapping, Sequence

from stoker.errors import UserError

__all__ = ["ALLOCATORS", "find", "preload"]

ALLOCATORS = ("auto", "default", "tcmalloc", "jemalloc")
_DONE = "STOKER_ALLOCATOR"
_PLACES = ("{prefix}/lib", "/usr/local/lib", "/usr/lib/*-linux-gnu", "/usr/lib64", "/usr/lib", "{home}/.local/lib")
_NAMES = {"tcmalloc": ("libtcmalloc.so*", "libtcmalloc_minimal.so*"), "jemalloc": ("libjemalloc.so*",)}


def find(name: str) -> str | None:
    """The library of an allocator, in the directories where ipexrun looked."""
    for place in _PLACES:
        where = place.format(prefix=glob.escape(sys.prefix), home=glob.escape(os.path.expanduser("~")))
        for pattern in _NAMES[name]:
            found = sorted(glob.glob(os.path.join(where, pattern)))
            if found:
                return found[0]
    return None


def preload(name: str, command: Sequence[str], environment: Mapping[str, str] = os.environ) -> None:
    """Restarts this process with the allocator loaded; returns if there is nothing to do."""
    if name == "default" or environment.get(_DONE) == name:
        return
    wanted = ("tcmalloc", "jemalloc") if name == "auto" else (name,)
    library = next(filter(None, map(find, wanted)), None)
    if library is None:
        if name == "auto":
            return
        package = "libtcmalloc-minimal4" if name == "tcmalloc" else "libjemalloc2"
        raise UserError(
            f"--memory-allocator {name}: the library is not installed on this machine; install it (Debian: {package})"
        )
    before = environment.get("LD_PRELOAD", "")
    extended = {**environment, "LD_PRELOAD": ":".join(filter(None, [library, before])), _DONE: name}
    os.execve(command[0], list(command), extended)
