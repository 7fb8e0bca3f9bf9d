"""Between the leaders of hosts: gloo, and oneCCL where it is installed; which of them carries what is measured once.

The choice is a row of four: small and large messages of 32 bits and more, and the same of 16 bits, which oneCCL adds one by
one on CPUs without AVX-512. It is kept in the cache per set of hosts, and the same on all of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import statistics
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from stoker.comm.host_groups import exchange
from stoker.comm.tensors import op_code, type_code
from stoker.machine import cache_directory

__all__ = ["LONGEST_FAREWELL", "SMALL", "OneCCL", "open_oneccl"]

SMALL = 64 << 10
"""Bytes; the compiled backend knows the same number."""
LONGEST_FAREWELL = 10.0
_PROBES = ((torch.float32, 1024), (torch.float32, 2_000_000), (torch.bfloat16, 2048), (torch.bfloat16, 4_000_000))
_ROUNDS = 5
_NAMES = ("small", "large", "small of 16 bits", "large of 16 bits")


@dataclass(frozen=True)
class OneCCL:
    """One leader's end of the wire."""

    lib: ctypes.CDLL
    handle: int
    takes: tuple[bool, bool, bool, bool]
    """Whether oneCCL, and not gloo, carries: small, large, small of 16 bits, large of 16 bits."""

    def carries(self, tensor: torch.Tensor, op: str) -> bool:
        half = tensor.dtype in (torch.bfloat16, torch.float16)
        large = tensor.numel() * tensor.element_size() > SMALL
        return self.takes[2 * half + large] and bool(self.lib.stoker_oneccl_reduces(type_code(tensor), op_code(op)))

    def start(self, tensor: torch.Tensor, op: str) -> int:
        """In place and at once; `wait` ends it."""
        request: int = self.lib.stoker_oneccl_allreduce(
            self.handle, tensor.data_ptr(), tensor.numel(), type_code(tensor), op_code(op)
        )
        return request

    def wait(self, request: int, timeout: timedelta) -> None:
        if self.lib.stoker_oneccl_wait(request, timeout.total_seconds()):
            raise RuntimeError(self.lib.stoker_oneccl_error().decode(errors="replace"))

    def leave(self) -> None:
        self.lib.stoker_oneccl_leave(self.handle, LONGEST_FAREWELL)

    def described(self) -> str:
        if len(set(self.takes)) == 1:
            return "oneCCL" if self.takes[0] else "gloo, which measures faster than oneCCL here,"
        kinds = ", ".join(name for name, taken in zip(_NAMES, self.takes, strict=True) if taken)
        return f"oneCCL ({kinds}) and gloo"


def open_oneccl(
    store: dist.Store,
    rank: int,
    size: int,
    hosts: str,
    gloo: Any,
    address: str | None,
    timeout: timedelta,
    forced: bool,
) -> tuple[OneCCL | None, str]:
    """Collective over the leaders: all get it, or none, with the reason of one that has not."""
    from stoker.comm.oneccl import OneCCLUnavailable, join, library

    lib, reason = None, ""
    try:
        lib = library(address)
    except OneCCLUnavailable as error:
        reason = str(error)
    if reasons := list(filter(None, exchange(store, "library", rank, size, reason))):
        return None, reasons[0]
    assert lib is not None
    handle = 0
    try:
        handle = join(lib, dist.PrefixStore("join", store), rank, size, timeout)
    except OneCCLUnavailable as error:
        reason = f"oneCCL does not reach the other hosts: {error}"
    if reasons := list(filter(None, exchange(store, "joined", rank, size, reason))):
        return None, reasons[0]  # a handle that others do not have is forgotten: leaving it would wait for them
    wire = OneCCL(lib, handle, (True, True, True, True))
    if not forced:
        wire = OneCCL(lib, handle, _choice(store, rank, size, hosts, wire, gloo, timeout))
    return wire, ""


def _choice(
    store: dist.Store, rank: int, size: int, hosts: str, wire: OneCCL, gloo: Any, timeout: timedelta
) -> tuple[bool, bool, bool, bool]:
    file = f"wire-{hashlib.sha256(hosts.encode()).hexdigest()[:16]}.json"
    kept = (cache_directory.load(file) or {}) if rank == 0 else {}
    known = json.dumps([bool(kept[name]) for name in _NAMES]) if set(kept) >= set(_NAMES) else ""
    answer = exchange(store, "known", rank, size, known)[0]
    if not answer:
        faster = [_is_faster(wire, gloo, *probe, timeout) for probe in _PROBES]
        answer = exchange(store, "faster", rank, size, json.dumps(faster))[0]  # the first leader's word holds for all
        if rank == 0:
            with contextlib.suppress(OSError):
                cache_directory.save(file, dict(zip(_NAMES, faster, strict=True)))
    first, second, third, fourth = json.loads(answer)
    return first, second, third, fourth


def _is_faster(wire: OneCCL, gloo: Any, dtype: torch.dtype, count: int, timeout: timedelta) -> bool:
    tensor = torch.zeros(count, dtype=dtype)
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        gloo.allreduce([tensor]).wait()
        middle = time.perf_counter()
        wire.wait(wire.start(tensor, "SUM"), timeout)
        seconds[0].append(middle - start)
        seconds[1].append(time.perf_counter() - middle)
    return statistics.median(seconds[1]) < statistics.median(seconds[0])
