"""Opens the shared memory between the ranks of one host, through which csrc/comm/ runs their collectives.

The ranks find each other through a c10d store. The result is a handle of the functions stoker_comm_* in csrc/stoker.h.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from stoker.kernels import native

__all__ = ["Offer", "SharedMemoryUnavailable", "open_shared_memory", "slot_bytes"]


class SharedMemoryUnavailable(RuntimeError):
    """The ranks of this host cannot share memory; the message is the reason."""


def slot_bytes(ranks: int) -> int:
    """The size of a piece: small enough that the pieces of all ranks stay in the shared cache, large enough to hide a wait."""
    return max(64 << 10, min(512 << 10, (1 << 20) // ranks // 4096 * 4096), (256 * ranks + 4095) // 4096 * 4096)


class Offer:
    """Shared memory that the first rank of a group creates before it knows where the others are.

    Its address goes to the others with the first message of the group, which saves a round through the store.
    """

    def __init__(self, ranks: int, named: bool) -> None:
        lib = native.library()
        self.handle: int | None = lib.stoker_comm_create(ranks, 0, slot_bytes(ranks), int(named))
        found: bytes = (
            lib.stoker_comm_address(self.handle) if self.handle else b"none:" + lib.stoker_comm_opening_error()
        )
        self.address = found.decode()

    def withdraw(self) -> None:
        """Frees the memory, unless it has become a group's."""
        if self.handle:
            native.library().stoker_comm_destroy(self.handle)
        self.handle = None


def open_shared_memory(
    store: dist.Store,
    rank: int,
    names: Sequence[int],
    timeout: timedelta,
    kind: str = "auto",
    offered: str = "",
    offer: Offer | None = None,
) -> int:
    """The handle of this rank in a group of all `names`. Collective: all succeed, or all raise SharedMemoryUnavailable.

    `names` are the ranks' numbers in the whole job, used in error messages. `kind` is "memfd", "named", or "auto" to try both.
    `offered` is the address of a memfd that the first rank has created, whose `offer` it is.
    """
    reasons = []
    for one in ("memfd", "named") if kind == "auto" else (kind,):
        given = one == "memfd" and offered
        try:
            prefixed = dist.PrefixStore(one, store)
            handle = _attach_all(
                prefixed, rank, names, one == "named", offered if given else "", offer if given else None
            )
        except SharedMemoryUnavailable as error:
            reasons.append(str(error))
            continue
        native.library().stoker_comm_names(handle, (ctypes.c_int64 * len(names))(*names))
        native.library().stoker_comm_timeout(handle, timeout.total_seconds())
        return handle
    raise SharedMemoryUnavailable("; ".join(reasons))


def _attach_all(store: Any, rank: int, names: Sequence[int], named: bool, address: str, offer: Offer | None) -> int:
    """The first rank creates the segment, the others attach to it; all return a handle, or all raise with one reason."""
    lib = native.library()
    if rank == 0:
        offer = offer or Offer(len(names), named)
        if not address:
            store.set("address", offer.address)
        address, handle = offer.address, offer.handle
        offer.handle = None
    else:
        address = address or _first_address(store, names)
        handle = None if address.startswith("none:") else lib.stoker_comm_attach(address.encode(), rank)
    if address.startswith("none:"):
        raise SharedMemoryUnavailable(address.removeprefix("none:"))
    if not handle:
        reason = lib.stoker_comm_opening_error().decode()
        store.set("cannot attach", reason)
        raise SharedMemoryUnavailable(reason)
    try:
        _await_all(store, int(handle), names)
    except BaseException:
        lib.stoker_comm_destroy(handle)
        raise
    lib.stoker_comm_seal(handle)
    return int(handle)


def _first_address(store: Any, names: Sequence[int]) -> str:
    try:
        return str(store.get("address").decode())
    except dist.DistStoreError as error:
        raise _missing(names[0], store) from error


def _await_all(store: Any, handle: int, names: Sequence[int]) -> None:
    """In the segment itself all ranks see who is attached; only a rank that cannot attach says so through the store."""
    deadline = time.monotonic() + store.timeout.total_seconds()
    while (missing := native.library().stoker_comm_await_all(handle, 0.01)) >= 0:
        if store.check(["cannot attach"]):
            raise SharedMemoryUnavailable(store.get("cannot attach").decode())
        if time.monotonic() > deadline:
            raise _missing(names[missing], store)


def _missing(rank: int, store: Any) -> RuntimeError:
    seconds = store.timeout.total_seconds()
    return RuntimeError(
        f"ccl: timeout while setting up a group: rank {rank} did not set up shared memory with this rank within {seconds:g} s"
    )
