"""Measures matrix products in fp32 and bf16, the clock during them, and memory bandwidth.

The best of many short runs counts, as in STREAM: other load can only make a run slower. `stoker.machine.rates` defines and
stores the figures.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from stoker.machine import load
from stoker.machine.facts import Machine
from stoker.machine.rates import Rates, save

if TYPE_CHECKING:
    import torch

__all__ = ["STEPS", "Clock", "Progress", "measure_rates", "remeasure"]

Clock = Callable[[int], float | None]
"""Threads -> the clock in GHz of that many busy cores (`stoker.kernels.clock`, which this package must not import)."""
Progress = Callable[[str], None]
"""Called with the name of each step as it begins."""

STEPS = ("fp32, one thread", "fp32, all threads", "bf16, one thread", "bf16, all threads", "memory bandwidth")

_SMALLEST, _LARGEST = 128, 4096  # matrix sizes: 2 ms at the 2 GFLOP/s of emulated bf16, 200 MB at the other end
_LONGEST = 0.25  # of a step's time for one product: longer than scheduler noise, short enough to repeat
_PARTS = (0.45, 0.9)  # of a step's time, at which the clock is measured; clocks change


def measure_rates(
    machine: Machine, *, clock: Clock | None, progress: Progress | None = None, seconds: float = 6.0
) -> Rates:
    """Measures in at most about `seconds`, with torch's own products. Leaves torch's thread count as it was.

    `clock` has no default because rates without a clock are compared with the nominal one, which boost exceeds. Pass
    `stoker.kernels.clock.clock_ghz`, or None if only the rates matter.
    """
    import torch

    begin = time.perf_counter()
    end = begin + seconds
    threads, before = machine.usable_threads, torch.get_num_threads()
    begin_step = progress or (lambda step: None)
    others = load.others_during()
    probe = _ClockProbe(machine, clock)
    size = _SMALLEST
    products: list[tuple[float, float | None]] = []
    plan = ((torch.float32, 1), (torch.float32, threads), (torch.bfloat16, 1), (torch.bfloat16, threads))
    try:
        for index, (dtype, count) in enumerate(plan):
            begin_step(STEPS[index])
            torch.set_num_threads(count)
            share = (end - time.perf_counter()) / (len(STEPS) - index)
            # All threads start with the size that one thread reached: small products would measure the scheduler.
            rate, size, ghz = product_gflops(dtype, share, _SMALLEST if count == 1 else size, probe)
            products.append((round(rate, 2), ghz))
        begin_step(STEPS[4])
        torch.set_num_threads(threads)
        arrays = [
            torch.zeros(_bandwidth_elements(machine)) for _ in range(3)
        ]  # first touched by the threads that use them
        bandwidth_all = _triad_gigabytes(arrays, (end - time.perf_counter()) / 2)
        torch.set_num_threads(1)
        bandwidth_one = _triad_gigabytes(arrays, end - time.perf_counter())
    finally:
        torch.set_num_threads(before)
    (fp32_one, clock_one), (fp32_all, clock_all), (bf16_one, _), (bf16_all, clock_bf16) = products
    return Rates(
        threads=threads,
        fp32_one=fp32_one,
        fp32_all=fp32_all,
        bf16_one=bf16_one,
        bf16_all=bf16_all,
        bandwidth_one=round(bandwidth_one, 2),
        bandwidth_all=round(bandwidth_all, 2),
        clock_one=clock_one,
        clock_all=clock_all,
        clock_bf16=clock_bf16,
        torch=str(torch.__version__),
        measured=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        seconds=round(time.perf_counter() - begin, 2),
        disturbed=(watched := others()) is not None and watched.disturbs,
    )


def remeasure(
    machine: Machine, rates: Rates, *, clock: Clock | None, bf16: bool = False, seconds: float = 0.5
) -> Rates:
    """Measures one product again with all threads; returns and stores updated rates if it is faster than before.

    The machine may have been busy the first time. The clock is measured too: a new product compared with an old clock could
    exceed its peak.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(rates.threads)
    try:
        dtype = torch.bfloat16 if bf16 else torch.float32
        found, _, ghz = product_gflops(dtype, seconds, 4 * _SMALLEST, _ClockProbe(machine, clock))
    finally:
        torch.set_num_threads(before)
    rate = round(found, 2)
    if bf16 and rate > rates.bf16_all:
        better = dataclasses.replace(rates, bf16_all=rate, clock_bf16=_highest(rates.clock_bf16, ghz))
    elif not bf16 and rate > rates.fp32_all:
        better = dataclasses.replace(rates, fp32_all=rate, clock_all=_highest(rates.clock_all, ghz))
    else:
        return rates
    save(machine, better)
    return better


def _highest(*clocks: float | None) -> float | None:
    return max((ghz for ghz in clocks if ghz), default=None)


class _ClockProbe:
    """Measures the clock while a product keeps the cores busy: a core that only adds numbers may run faster."""

    def __init__(self, machine: Machine, clock: Clock | None) -> None:
        self._clock = clock
        # On the cores that run the product: an idle efficiency core has another clock.
        self._cpus = {cpu for core in machine.fast_cores for cpu in core.cpus} & set(machine.usable_cpus)

    def measure(self, product: Callable[[], object]) -> float | None:
        """The clock in GHz of one core while `product` is repeated; None if it cannot be measured."""
        if self._clock is None:
            return None
        found: list[float | None] = []
        watcher = threading.Thread(target=self._watch, args=(self._clock, found), daemon=True)
        watcher.start()
        while watcher.is_alive():
            product()
        watcher.join()
        return round(found[0], 3) if found and found[0] else None

    def _watch(self, clock: Clock, found: list[float | None]) -> None:
        with contextlib.suppress(AttributeError, OSError):  # not supported on this system, or not allowed
            os.sched_setaffinity(0, self._cpus)  # 0: this thread
        found.append(clock(1))


def product_gflops(
    dtype: torch.dtype, seconds: float, size: int, probe: _ClockProbe
) -> tuple[float, int, float | None]:
    """The best rate of square products, the size that `size` has grown to, and the highest clock seen during products."""
    import torch

    begin = time.perf_counter()
    best, ghz = 0.0, 0.0
    for part in _PARTS:
        rate, size = _best_product(dtype, begin + part * seconds, size, _LONGEST * seconds)
        best = max(best, rate)
        left, right, out = (
            torch.ones(size // 2, size // 2, dtype=dtype) for _ in range(3)
        )  # takes an eighth of the time
        ghz = max(ghz, probe.measure(functools.partial(torch.mm, left, right, out=out)) or 0.0)
    return best, size, ghz or None


def _best_product(dtype: torch.dtype, end: float, size: int, longest: float) -> tuple[float, int]:
    """The best rate until `end`, and the last size: it grows until a product takes long enough for a reliable timing."""
    import torch

    best, trials, shortest = 0.0, 0, math.inf
    left = right = out = torch.empty(0)
    while trials < 2 or time.perf_counter() < end:
        if left.shape[0] != size:
            left, right, out = (torch.ones(size, size, dtype=dtype) for _ in range(3))
            torch.mm(left, right, out=out)  # warm-up
            shortest = math.inf
        start = time.perf_counter()
        torch.mm(left, right, out=out)
        taken = max(time.perf_counter() - start, 1e-9)
        best = max(best, 2 * size**3 / taken / 1e9)
        trials += 1
        shortest = min(shortest, taken)
        # Twice the size is eight times the work.
        if 8 * shortest < longest and size < _LARGEST:
            size *= 2
    return best, size


def _bandwidth_elements(machine: Machine) -> int:
    """Floats per array: four times the last-level caches, so that they cannot help, but a small part of the memory."""
    last = max((cache.level for cache in machine.caches), default=0)
    cached = sum(cache.size or 0 for cache in machine.caches if cache.level == last and cache.kind != "instruction")
    room = (machine.usable_memory or 1 << 32) // 24
    return max(min(max(4 * cached, 64 << 20), 512 << 20, room), 1 << 20) // 4


def _triad_gigabytes(arrays: list[torch.Tensor], seconds: float) -> float:
    import torch

    left, right, out = arrays
    end = time.perf_counter() + seconds
    best, trials = 0.0, 0
    while trials < 2 or time.perf_counter() < end:
        start = time.perf_counter()
        torch.add(left, right, alpha=2.0, out=out)
        taken = max(time.perf_counter() - start, 1e-9)
        best = max(best, 3 * out.numel() * out.element_size() / taken / 1e9)
        trials += 1
    return best
