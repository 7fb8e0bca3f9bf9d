"""What the kernels would take on more threads than this machine has (csrc/core/virtual_threads.h).

    with virtual_threads(56) as regions:
        loss(model, batch).backward()
    print(table(regions(), 56))

STOKER_VIRTUAL_THREADS=56 does the same for a whole program, and prints the table at its end.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from stoker.kernels import native

__all__ = ["MOST_THREADS", "Region", "cost_of_region", "start_for_program", "table", "virtual_threads"]

MOST_THREADS = 4096


@dataclass(frozen=True)
class Region:
    """A parallel region of a kernel, all of its calls added up. Times are seconds."""

    kernel: str
    """The function of csrc/stoker.h."""
    place: str
    """The function of the C++ source and the line in it."""
    threads: int
    """How many threads it would use: those of the kernel, or fewer where the work is small."""
    calls: int
    units: int
    """Into how many pieces the work of all calls could be cut; 0 where code that is not ours divides it."""
    fewest: int
    """The pieces of the call that has the fewest."""
    work: float
    makespan: float
    """Until the last thread has finished."""
    longest: float
    """The longest piece of all."""
    measured: float
    """What it took here, with its measurement."""

    def efficiency(self, threads: int) -> float:
        """The share of the time of `threads` threads that is work."""
        return self.work / (threads * self.makespan) if self.makespan else 1.0


@contextmanager
def virtual_threads(count: int) -> Iterator[Callable[[], list[Region]]]:
    """Kernels run on the calling thread and are timed as if they had `count` threads; yields what returns their regions,
    during the block and after it. torch's own operators run on one thread meanwhile.
    """
    library, before, real = native.library(), torch.get_num_threads(), native.threads
    torch.set_num_threads(1)
    native.threads = lambda: count
    library.stoker_virtual_threads(count)
    ended: list[list[Region]] = []
    try:
        yield lambda: ended[0] if ended else _recorded(library)
    finally:
        ended.append(_recorded(library))
        library.stoker_virtual_threads(0)
        native.threads = real
        torch.set_num_threads(before)


def cost_of_region(threads: int) -> float:
    """Seconds for waking `threads` threads and waiting until all of them are back, once per region. Makespans do not contain it.

    Measured here with two real threads, and multiplied by log2(threads), which is an assumption: the fewest rounds in which
    threads can tell each other. Threads that have gone to sleep (OMP_WAIT_POLICY=passive, long pauses) take longer.
    """
    if threads <= 1:
        return 0.0
    if native.threads is not torch.get_num_threads:
        raise RuntimeError("cost_of_region wakes real threads: call it before or after virtual_threads, not during it")
    return _cost_of_two() * math.log2(threads)


@functools.cache
def _cost_of_two() -> float:
    """Of an empty region: the difference to the same call without one. The best of ten medians: other programs slow it."""
    library = native.library()

    def seconds(threads: int) -> float:
        times = []
        for _ in range(201):
            begin = time.perf_counter()
            library.stoker_count_threads(threads)
            times.append(time.perf_counter() - begin)
        return statistics.median(times)

    return max(1e-7, min(seconds(2) for _ in range(10)) - min(seconds(1) for _ in range(10)))


def start_for_program(library: ctypes.CDLL, count: int) -> None:
    """As `virtual_threads`, until the program ends; the table is printed then."""
    torch.set_num_threads(1)
    native.threads = lambda: count
    library.stoker_virtual_threads(count)
    atexit.register(lambda: print(table(_recorded(library), count), file=sys.stderr))


def table(regions: Iterable[Region], threads: int) -> str:
    """The regions, the one that loses most first: its shares of the work, and of the time that threads wait."""
    found = sorted(regions, key=lambda region: region.work - threads * region.makespan)
    work, makespan = sum(region.work for region in found), sum(region.makespan for region in found)
    if not makespan:
        return f"{threads} virtual threads: no kernel was called"
    lost = threads * makespan - work
    lines = [
        f"{threads} virtual threads: {work:.3f} s of work would take {makespan:.4f} s,"
        f" efficiency {work / (threads * makespan):.2f}",
        f"{'region':58}{'calls':>7}{'pieces':>8}{'fewest':>8}{'work':>7}{'loss':>7}{'efficiency':>12}",
    ]
    for region in found:
        pieces = f"{region.units / region.calls:.0f}" if region.units else "-"
        waited = threads * region.makespan - region.work
        lines.append(
            f"{region.kernel.removeprefix('stoker_') + ', ' + region.place:58}{region.calls:7}{pieces:>8}"
            f"{region.fewest or '-':>8}{region.work / work:7.1%}{waited / lost if lost > 0 else 0.0:7.1%}"
            f"{region.efficiency(threads):12.2f}"
        )
    return "\n".join(lines)


def _recorded(library: ctypes.CDLL) -> list[Region]:
    count = library.stoker_regions(None, 0)
    found = (native.struct("stoker_region") * count)()
    library.stoker_regions(found, count)
    return [
        Region(
            kernel=region.kernel.decode(),
            place=f"{region.where.decode()}:{region.line}",
            threads=region.threads,
            calls=region.calls,
            units=region.units,
            fewest=region.fewest,
            work=region.work,
            makespan=region.makespan,
            longest=region.longest,
            measured=region.measured,
        )
        for region in found
    ]
