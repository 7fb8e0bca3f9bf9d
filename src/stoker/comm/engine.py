"""The shared-memory engine from Python: a group of ranks on one host.

Its C functions, stoker_comm_*, are declared in csrc/stoker.h. The ranks find each other through a c10d store; after that no
byte leaves the segment. Arguments are addresses and sizes, tensors are the business of the callers.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from stoker.kernels import native

__all__ = ["CollectiveError", "SharedMemory", "SharedMemoryUnavailable", "chosen_memory", "slot_bytes"]


class CollectiveError(RuntimeError):
    """A collective failed: a rank is missing, has died, or called something else; the message names it."""


class SharedMemoryUnavailable(RuntimeError):
    """The ranks of this host cannot share memory; the message says why."""


def slot_bytes(ranks: int) -> int:
    """The size of a piece: small enough that the pieces of all ranks stay in the shared cache, large enough to hide a wait."""
    return max(64 << 10, min(512 << 10, (1 << 20) // ranks // 4096 * 4096), (256 * ranks + 4095) // 4096 * 4096)


class SharedMemory:
    """This process's seat among the ranks of one host. One thread at a time may call its collectives."""

    def __init__(self, handle: int, rank: int, ranks: int) -> None:
        self.handle = handle
        self.rank = rank
        self.ranks = ranks
        self._ending = threading.Lock()
        """One thread may close the group while another aborts it."""

    @classmethod
    def open(
        cls,
        store: dist.Store,
        rank: int,
        ranks: int,
        names: Sequence[int],
        timeout: timedelta,
        piece: int | None = None,
        wanted: Callable[[], bool] = lambda: True,
    ) -> SharedMemory:
        """Meets the other ranks through `store`, under keys of its own. All succeed, or all raise SharedMemoryUnavailable.

        `names` are the ranks' numbers in the whole job, for errors to name them by. When `wanted` says no, it stops waiting
        for them and raises CollectiveError.
        """
        reasons = []
        asked = chosen_memory()
        for kind in ("memfd", "named") if asked == "auto" else (asked,):
            try:
                own = dist.PrefixStore(kind, store)
                group = _meet(own, rank, names, kind == "named", piece or slot_bytes(ranks), wanted)
            except SharedMemoryUnavailable as error:
                reasons.append(str(error))
                continue
            native.library().stoker_comm_names(group.handle, (ctypes.c_int64 * ranks)(*names))
            native.library().stoker_comm_timeout(group.handle, timeout.total_seconds())
            return group
        raise SharedMemoryUnavailable("; ".join(reasons))

    def call(self, name: str, *arguments: Any) -> None:
        """Runs the collective `name` and raises CollectiveError with the engine's own words if it fails."""
        if getattr(native.library(), f"stoker_comm_{name}")(self.handle, *arguments):
            raise CollectiveError(f"ccl: {native.library().stoker_comm_error(self.handle).decode(errors='replace')}")

    def set_timeout(self, timeout: timedelta) -> None:
        native.library().stoker_comm_timeout(self.handle, timeout.total_seconds())

    def waited(self) -> list[float]:
        """Seconds this rank has waited so far, by the rank it waited for."""
        seconds = (ctypes.c_double * self.ranks)()
        native.library().stoker_comm_waited(self.handle, seconds)
        return list(seconds)

    def abort(self, why: str) -> None:
        """Lets every rank that waits in this group raise, soon."""
        with self._ending:
            if self.handle:
                native.library().stoker_comm_abort(self.handle, why.encode())

    def release(self) -> int:
        """Hands the group over to C++, which destroys it when done."""
        handle, self.handle = self.handle, 0
        return handle

    def close(self) -> None:
        with self._ending:
            handle, self.handle = self.handle, 0
            if handle:
                native.library().stoker_comm_destroy(handle)


def chosen_memory() -> str:
    asked = os.environ.get("STOKER_CCL_SHM") or "auto"
    if asked not in {"auto", "memfd", "named"}:
        raise ValueError(f"STOKER_CCL_SHM={asked!r} is not a kind of shared memory; choose auto, memfd or named")
    return asked


def _read(store: Any, key: str, whose: int, wanted: Callable[[], bool]) -> bytes:
    """Polls: a store's blocking get would lock out every other thread of this process that uses the same store."""
    deadline, pause = time.monotonic() + store.timeout.total_seconds(), 0.0005
    while not store.check([key]):
        if not wanted():
            raise CollectiveError("this ccl group has been destroyed")
        if time.monotonic() > deadline:
            seconds = store.timeout.total_seconds()
            raise CollectiveError(f"ccl: rank {whose} has not come to share memory with this one within {seconds:g} s")
        time.sleep(pause)
        pause = min(pause * 1.5, 0.02)
    return bytes(store.get(key))


def _meet(
    store: Any, rank: int, names: Sequence[int], named: bool, piece: int, wanted: Callable[[], bool]
) -> SharedMemory:
    lib, ranks = native.library(), len(names)
    handle, trouble = None, ""
    if rank == 0:
        handle = lib.stoker_comm_create(ranks, 0, piece, int(named))
        trouble = "" if handle else lib.stoker_comm_opening_error().decode()
        store.set("address", lib.stoker_comm_address(handle) if handle else f"none:{trouble}".encode())
    else:
        address = _read(store, "address", names[0], wanted)
        if address.startswith(b"none:"):
            raise SharedMemoryUnavailable(address[5:].decode())
        handle = lib.stoker_comm_attach(address, rank)
        trouble = "" if handle else lib.stoker_comm_opening_error().decode()
        store.set(f"attached/{rank}", trouble or "ok")
    try:
        trouble = _verdict(store, rank, names, handle, trouble, wanted)
    except CollectiveError:
        if handle:
            lib.stoker_comm_destroy(handle)
        raise
    if trouble or not handle:
        if handle:
            lib.stoker_comm_destroy(handle)
        raise SharedMemoryUnavailable(trouble)
    return SharedMemory(handle, rank, ranks)


def _verdict(
    store: Any, rank: int, names: Sequence[int], handle: int | None, trouble: str, wanted: Callable[[], bool]
) -> str:
    """Why the ranks cannot share memory, the same on all; empty if they can."""
    if rank == 0 and handle:
        found = [_read(store, f"attached/{other}", names[other], wanted).decode() for other in range(1, len(names))]
        trouble = next((text for text in found if text != "ok"), "")
        native.library().stoker_comm_seal(handle)  # attached or not: from here on nobody needs the name
        store.set("verdict", trouble or "ok")
    elif rank != 0:
        verdict = _read(store, "verdict", names[0], wanted).decode()
        trouble = "" if verdict == "ok" else verdict
    return trouble
