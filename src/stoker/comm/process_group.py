"""Creates a process group of the backend "ccl": the compiled one where it can be had, else the one in Python, said once."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from stoker.comm.engine import SharedMemory
from stoker.comm.paths import Paths, open_paths

__all__ = ["create", "open_channel"]

_CHANNEL_PIECE = 64 << 10  # bytes per slot of a point-to-point channel; there may be many of them
_said: set[str] = set()


def create(options: Any) -> Any:
    """Called by torch.distributed for every group, on all its ranks, with torch's _DistributedBackendOptions."""
    asked = os.environ.get("STOKER_CCL_BACKEND") or "auto"
    if asked not in {"auto", "compiled", "python"}:
        raise ValueError(f"STOKER_CCL_BACKEND={asked!r} is not a backend; choose auto, compiled or python")
    module = None if asked == "python" else _compiled(must=asked == "compiled")
    rank, size = options.group_rank, options.group_size
    names = tuple(options.global_ranks_in_group) or tuple(range(size))
    paths = open_paths(options.store, rank, size, names, options.timeout)
    if module is None:
        from stoker.comm.python_group import PythonGroup

        return PythonGroup(paths)
    if paths.wire is not None:
        _bind_wire(module, paths.wire.lib)
    return module.create(
        rank=rank,
        size=size,
        local=paths.local.release() if paths.local else 0,
        here=list(paths.here),
        hosts=len(paths.hosts),
        leaders=paths.leaders,
        flat=paths.flat,
        wire=paths.wire.handle if paths.wire else 0,
        wire_takes=list(paths.wire.takes) if paths.wire else [False] * 4,
        beyond=paths.beyond,
        timeout=paths.timeout.total_seconds(),
        explain=paths.roll_call,
        opener=lambda source, target, tag, wanted: open_channel(paths, source, target, tag, wanted).release(),
    )


def open_channel(paths: Paths, source: int, target: int, tag: int, wanted: Callable[[], bool]) -> SharedMemory:
    """The one-way channel from `source` to `target` for messages of `tag`; both ranks call it, in any order.

    Once `wanted` says no, whoever is alone there need not wait for the other any more.
    """
    store = dist.PrefixStore(f"channel/{source}/{target}/{tag}", paths.store)
    names = [paths.names[source], paths.names[target]]
    return SharedMemory.open(store, int(paths.rank == target), 2, names, paths.timeout, _CHANNEL_PIECE, wanted)


def _bind_wire(module: Any, lib: ctypes.CDLL) -> None:
    from stoker.comm.compiled import addresses
    from stoker.comm.oneccl import header

    module.bind_wire(addresses(lib, header()))


def _compiled(must: bool) -> Any:
    from stoker.comm.compiled import CompiledUnavailable, load

    try:
        return load()
    except CompiledUnavailable as error:
        if must:
            raise
        if not _said:
            _said.add(str(error))
            print(f"stoker ccl: the backend runs in Python, a little slower: {error}", file=sys.stderr, flush=True)
        return None
