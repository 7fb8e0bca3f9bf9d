"""Between the leaders of hosts: gloo, and oneCCL where it is installed. Which of them carries what is measured once.

The choice is made for four kinds of messages: small and large ones of 32 bits and more, and the same of 16 bits, which oneCCL
adds one by one on CPUs without AVX-512. It is kept in the cache per set of hosts, and is the same on all of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from stoker.comm.host_groups import exchange
from stoker.comm.oneccl import OneCCLUnavailable, join, library
from stoker.kernels import native
from stoker.machine import cache_directory

__all__ = ["OneCCL", "open_oneccl"]

_PROBES = {
    "small": (torch.float32, 1024),
    "large": (torch.float32, 2_000_000),
    "small of 16 bits": (torch.bfloat16, 2048),
    "large of 16 bits": (torch.bfloat16, 4_000_000),
}
"""What is measured for each kind of message; backend.cpp has the limit between small and large, and the same order."""
_ROUNDS = 5


@dataclass(frozen=True)
class OneCCL:
    """One leader's communicator."""

    library: ctypes.CDLL
    handle: int
    carries: tuple[bool, ...]
    """Whether oneCCL, and not gloo, carries messages of each kind in _PROBES."""

    def describe(self) -> str:
        if len(set(self.carries)) == 1:
            name = "oneCCL" if self.carries[0] else "gloo, which measures faster than oneCCL here,"
            return f"{name} between the leaders"
        kinds = ", ".join(kind for kind, taken in zip(_PROBES, self.carries, strict=True) if taken)
        return f"oneCCL ({kinds}) and gloo between the leaders"


def open_oneccl(
    store: dist.Store,
    rank: int,
    hosts: Sequence[str],
    gloo: Any,
    address: str | None,
    timeout: timedelta,
    *,
    measure: bool,
) -> tuple[OneCCL | None, str]:
    """Collective over the leaders, one per host: all get oneCCL, or none does and all get the reason.

    Without `measure` oneCCL carries everything.
    """
    size = len(hosts)
    lib, handle, problem = None, 0, ""
    try:
        lib = library(address)
    except OneCCLUnavailable as error:
        problem = str(error)
    if problems := list(filter(None, exchange(store, "library", rank, size, problem))):
        return None, problems[0]
    assert lib is not None
    try:
        handle = join(lib, dist.PrefixStore("join", store), rank, size, timeout)
    except OneCCLUnavailable as error:
        problem = f"oneCCL does not reach the other hosts: {error}"
    if problems := list(filter(None, exchange(store, "joined", rank, size, problem))):
        return None, problems[0]  # a handle that others do not have is not freed: that would wait for them
    everything = (True,) * len(_PROBES)
    return OneCCL(lib, handle, _choose(store, rank, hosts, lib, handle, gloo, timeout) if measure else everything), ""


def _choose(
    store: dist.Store, rank: int, hosts: Sequence[str], lib: ctypes.CDLL, handle: int, gloo: Any, timeout: timedelta
) -> tuple[bool, ...]:
    """For each kind of message, whether oneCCL is faster than gloo: as the first leader has cached or measured it."""
    file = f"leaders-{hashlib.sha256(chr(10).join(hosts).encode()).hexdigest()[:16]}.json"
    cached = (cache_directory.load(file) or {}) if rank == 0 else {}
    known = json.dumps([bool(cached[kind]) for kind in _PROBES]) if set(cached) >= set(_PROBES) else ""
    answer = exchange(store, "known", rank, len(hosts), known)[0]
    if not answer:
        faster = {kind: _is_faster(lib, handle, gloo, *probe, timeout) for kind, probe in _PROBES.items()}
        answer = exchange(store, "faster", rank, len(hosts), json.dumps(list(faster.values())))[0]
        if rank == 0:
            with contextlib.suppress(OSError):
                cache_directory.save(file, faster)
    return tuple(json.loads(answer))


def _is_faster(lib: ctypes.CDLL, handle: int, gloo: Any, dtype: torch.dtype, count: int, timeout: timedelta) -> bool:
    tensor = torch.zeros(count, dtype=dtype)
    arguments = (tensor.data_ptr(), count, native.dtype_code(dtype), native.constants("stoker_reduction")["SUM"])
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        gloo.allreduce([tensor]).wait()
        middle = time.perf_counter()
        if lib.stoker_oneccl_wait(lib.stoker_oneccl_allreduce(handle, *arguments), timeout.total_seconds()):
            raise RuntimeError(lib.stoker_oneccl_error().decode(errors="replace"))
        seconds[0].append(middle - start)
        seconds[1].append(time.perf_counter() - middle)
    return statistics.median(seconds[1]) < statistics.median(seconds[0])
