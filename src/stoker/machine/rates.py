"""What this machine really reaches: matrix products in fp32 and bf16, memory bandwidth; measured once per machine.

`known()` answers from the cache and imports no torch; `measure()` takes some seconds. Everything that speaks of a share
of the machine's peak takes it from here. The best of many short runs counts, as in STREAM: whatever else the machine
does can only make a run look slower.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

from stoker.machine import cache_directory, load
from stoker.machine.facts import Machine

if TYPE_CHECKING:
    import torch

__all__ = ["STEPS", "Clock", "Progress", "Rates", "forgotten_reason", "known", "measure", "raised"]

Clock = Callable[[int], float | None]
"""Threads -> the clock in GHz of that many busy cores (the native library can tell, and this room does not know it)."""
Progress = Callable[[str], None]
"""Called with the name of each step as it begins."""

STEPS = ("fp32, one thread", "fp32, all threads", "bf16, one thread", "bf16, all threads", "memory bandwidth")

_FORMAT = 1  # raised when the meaning of a stored figure changes
_SMALLEST, _LARGEST = 128, 4096  # matrix sizes: 2 ms at the 2 GFLOP/s of emulated bf16, 200 MB at the other end
_LONGEST = 0.25  # of a step's time for one product: long enough to outlast a busy scheduler, short enough to try again


@dataclass(frozen=True)
class Rates:
    """GFLOP/s of products, GB/s of memory (read two arrays, write one)."""

    threads: int
    """How many threads "all" were."""
    fp32_one: float
    fp32_all: float
    bf16_one: float
    bf16_all: float
    bandwidth_one: float
    bandwidth_all: float
    clock_one: float | None
    """GHz of one busy core; None where it was not measured."""
    clock_all: float | None
    torch: str
    measured: str
    """When, in UTC."""
    seconds: float
    disturbed: bool
    """Whether other programs kept CPUs busy meanwhile: then the figures are lower than what the machine can do."""

    @property
    def fastest_dtype(self) -> str:
        return "bf16" if self.bf16_all > self.fp32_all else "fp32"


def known(machine: Machine) -> Rates | None:
    """The rates measured before on this machine with this torch, if any."""
    stored = cache_directory.load(_name(machine))
    if stored is None or stored.get("format") != _FORMAT:
        return None
    fields = {field.name for field in dataclasses.fields(Rates)}
    values = stored.get("rates")
    if not isinstance(values, dict) or set(values) != fields or not _plausible(values):
        return None
    rates = Rates(**values)
    return rates if rates.torch == _torch_version() and rates.threads == machine.usable_threads else None


def _plausible(values: dict[str, Any]) -> bool:
    for field in dataclasses.fields(Rates):
        value = values[field.name]
        if field.name in {"torch", "measured"}:
            good = isinstance(value, str)
        elif field.name == "disturbed":
            good = isinstance(value, bool)
        elif value is None:
            good = field.name.startswith("clock")
        else:
            good = isinstance(value, int | float) and math.isfinite(value) and value > 0
        if not good:
            return False
    return True


def forgotten_reason(machine: Machine, rates: Rates) -> str | None:
    """Keeps `rates` for the next time; the reason in one sentence if that is not possible."""
    try:
        cache_directory.save(_name(machine), {"format": _FORMAT, "rates": dataclasses.asdict(rates)})
    except OSError as error:
        where = cache_directory.cache_directory()
        reason = error.strerror or str(error)
        return f"The measured rates could not be kept in {where or 'a cache'} ({reason}), so each run measures again."
    return None


def measure(
    machine: Machine, *, clock: Clock | None = None, progress: Progress | None = None, seconds: float = 6.0
) -> Rates:
    """Measures in at most about `seconds`, with torch's own products. Leaves torch's thread count as it was."""
    import torch

    begin = time.perf_counter()
    end = begin + seconds
    threads, before = machine.usable_threads, torch.get_num_threads()
    say = progress or (lambda step: None)
    others = load.others_during()
    size = _SMALLEST
    found: dict[str, float] = {}
    clocks: dict[int, float] = {}
    plan = (
        ("fp32_one", torch.float32, 1),
        ("fp32_all", torch.float32, threads),
        ("bf16_one", torch.bfloat16, 1),
        ("bf16_all", torch.bfloat16, threads),
    )
    try:
        for index, (key, dtype, count) in enumerate(plan):
            say(STEPS[index])
            torch.set_num_threads(count)
            _watch_clock(clock, count, clocks)
            share = (end - time.perf_counter()) / (len(STEPS) - index)
            # All threads begin where one thread ended: on a busy machine small products measure the scheduler.
            found[key], size = _product_gflops(dtype, share, _SMALLEST if count == 1 else size)
            _watch_clock(clock, count, clocks)
        say(STEPS[4])
        torch.set_num_threads(threads)
        arrays = [torch.zeros(_bandwidth_elements(machine)) for _ in range(3)]  # touched by those who will use them
        found["bandwidth_all"] = _triad_gigabytes(arrays, (end - time.perf_counter()) / 2)
        torch.set_num_threads(1)
        found["bandwidth_one"] = _triad_gigabytes(arrays, end - time.perf_counter())
    finally:
        torch.set_num_threads(before)
    return Rates(
        threads=threads,
        **{key: round(value, 2) for key, value in found.items()},
        clock_one=clocks.get(1),
        clock_all=clocks.get(threads),
        torch=str(torch.__version__),
        measured=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        seconds=round(time.perf_counter() - begin, 2),
        disturbed=(watched := others()) is not None and watched.disturbs,
    )


def raised(machine: Machine, rates: Rates, *, seconds: float = 0.5) -> Rates:
    """`rates` after a second look at fp32 with all threads; kept if higher, because the first may have met a busy minute."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(rates.threads)
    try:
        found, _ = _product_gflops(torch.float32, seconds, 4 * _SMALLEST)
    finally:
        torch.set_num_threads(before)
    if found <= rates.fp32_all:
        return rates
    better = dataclasses.replace(rates, fp32_all=round(found, 2))
    forgotten_reason(machine, better)
    return better


def _watch_clock(clock: Clock | None, threads: int, best: dict[int, float]) -> None:
    """Clocks wander with what the neighbours do; the best product must be held against the best clock around it."""
    ghz = clock(threads) if clock else None
    if ghz:
        best[threads] = max(best.get(threads, 0.0), round(ghz, 3))


def _product_gflops(dtype: torch.dtype, seconds: float, size: int) -> tuple[float, int]:
    """The best rate of square products, from `size` on growing until one takes long enough to be judged by; the last size."""
    import torch

    end = time.perf_counter() + seconds
    best, trials, shortest = 0.0, 0, math.inf
    left = right = out = torch.empty(0)
    while trials < 2 or time.perf_counter() < end:
        if left.shape[0] != size:
            left, right, out = (torch.ones(size, size, dtype=dtype) for _ in range(3))
            torch.mm(left, right, out=out)  # the first of a size sets things up
            shortest = math.inf
        start = time.perf_counter()
        torch.mm(left, right, out=out)
        taken = max(time.perf_counter() - start, 1e-9)
        best = max(best, 2 * size**3 / taken / 1e9)
        trials += 1
        shortest = min(shortest, taken)
        # Twice the size is eight times the work.
        if 8 * shortest < _LONGEST * seconds and size < _LARGEST:
            size *= 2
    return best, size


def _bandwidth_elements(machine: Machine) -> int:
    """Floats per array: four times the last-level caches, which then cannot help, in a small part of the memory."""
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


def _torch_version() -> str | None:
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None


def _name(machine: Machine) -> str:
    return f"rates-{machine.fingerprint}.json"
