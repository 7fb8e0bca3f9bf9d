"""Opens the shared memory between the ranks of one host, through which csrc/comm/ runs their collectives.

The ranks find each other through a c10d store. The result is a handle of the functions stoker_comm_* in csrc/stoker.h.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from stoker.kernels import native

__all__ = ["SharedMemoryUnavailable", "open_shared_memory", "slot_bytes"]


class SharedMemoryUnavailable(RuntimeError):
    """The ranks of this host cannot share memory; the message is the reason."""


def slot_bytes(ranks: int) -> int:
    """The size of a piece: small enough that the pieces of all ranks stay in the shared cache, large enough to hide a wait."""
    return max(64 << 10, min(512 << 10, (1 << 20) // ranks // 4096 * 4096), (256 * ranks + 4095) // 4096 * 4096)


def open_shared_memory(
    store: dist.Store,
    rank: int,
    names: Sequence[int],
    timeout: timedelta,
    kind: str = "auto",
    slot: int | None = None,
    wanted: Callable[[], bool] = lambda: True,
) -> int:
    """The handle of this rank in a group of all `names`. Collective: all succeed, or all raise SharedMemoryUnavailable.

    `names` are the ranks' numbers in the whole job, used in error messages. `kind` is "memfd", "named", or "auto" to try both.
    A rank stops waiting for the others, and raises RuntimeError, once `wanted` returns False.
    """
    reasons = []
    for one in ("memfd", "named") if kind == "auto" else (kind,):
        try:
            prefixed = dist.PrefixStore(one, store)
            handle = _attach_all(prefixed, rank, names, one == "named", slot or slot_bytes(len(names)), wanted)
        except SharedMemoryUnavailable as error:
            reasons.append(str(error))
            continue
        native.library().stoker_comm_names(handle, (ctypes.c_int64 * len(names))(*names))
        native.library().stoker_comm_timeout(handle, timeout.total_seconds())
        return handle
    raise SharedMemoryUnavailable("; ".join(reasons))


def _attach_all(store: Any, rank: int, names: Sequence[int], named: bool, slot: int, wanted: Callable[[], bool]) -> int:
    """The first rank creates the segment, the others attach to it; all return a handle, or all raise with one reason."""
    lib = native.library()
    if rank == 0:
        handle = lib.stoker_comm_create(len(names), 0, slot, int(named))
        address = lib.stoker_comm_address(handle) if handle else b"none:" + lib.stoker_comm_opening_error()
        store.set("address", address)
    else:
        address = _read(store, "address", names[0], wanted)
        handle = None if address.startswith(b"none:") else lib.stoker_comm_attach(address, rank)
    if address.startswith(b"none:"):
        raise SharedMemoryUnavailable(address[5:].decode())
    try:
        if rank == 0:
            outcomes = [_read(store, f"attached/{other}", names[other], wanted) for other in range(1, len(names))]
            outcome = next((text for text in outcomes if text != b"ok"), b"ok")
            lib.stoker_comm_seal(handle)  # whether or not all are attached, nobody needs the address any more
            store.set("outcome", outcome)
        else:
            store.set(f"attached/{rank}", "ok" if handle else lib.stoker_comm_opening_error())
            outcome = _read(store, "outcome", names[0], wanted)
        if outcome != b"ok":
            raise SharedMemoryUnavailable(outcome.decode())
    except RuntimeError:
        if handle:
            lib.stoker_comm_destroy(handle)
        raise
    return int(handle)


def _read(store: Any, key: str, owner: int, wanted: Callable[[], bool]) -> bytes:
    """Polls, because a blocking get would lock out every other thread of this process that uses the same store."""
    deadline, pause = time.monotonic() + store.timeout.total_seconds(), 0.0005
    while not store.check([key]):
        if not wanted():
            raise RuntimeError("this ccl group has been destroyed")
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"ccl: rank {owner} did not set up shared memory with this rank within {store.timeout.total_seconds():g} s"
            )
        time.sleep(pause)
        pause = min(pause * 1.5, 0.02)
    return bytes(store.get(key))
