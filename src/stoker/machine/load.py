"""The current load of the machine, from two readings of /proc/stat."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from stoker.machine.tree import Tree

__all__ = ["Load", "between", "current_load", "others_during", "read_counters"]

Ticks = tuple[int, ...]


@dataclass(frozen=True)
class Load:
    busy: float
    """CPUs kept busy, by all processes together."""
    stolen: float
    """CPUs that the hypervisor gave to other virtual machines."""
    cpus: int

    @property
    def disturbs(self) -> bool:
        """Whether it is enough to slow training down or to distort a measurement."""
        return self.busy > max(0.25 * self.cpus, 0.5)


def current_load(seconds: float = 0.2) -> Load | None:
    """The load over the next `seconds`; None if it cannot be read."""
    tree = Tree("/")
    first = read_counters(tree)
    time.sleep(seconds)
    second = read_counters(tree)
    return between(first, second) if first and second else None


def others_during(
    own: Callable[[], float] = time.process_time, cpus: Collection[int] | None = None
) -> Callable[[], Load | None]:
    """Starts a measurement; the returned function ends it and returns the load without that of this process.

    `own`: the CPU time so far of all processes that are not others; `cpus`: look at these CPUs only.
    """
    tree = Tree("/")
    first, begin, before = read_counters(tree, cpus), time.perf_counter(), own()

    def end() -> Load | None:
        second = read_counters(tree, cpus)
        load = between(first, second) if first and second else None
        if load is None:
            return None
        mine = (own() - before) / max(time.perf_counter() - begin, 1e-9)
        return replace(load, busy=max(load.busy - mine, 0.0))

    return end


def read_counters(tree: Tree, cpus: Collection[int] | None = None) -> tuple[Ticks, int] | None:
    """The counters of all CPUs together, or of `cpus`, and the number of CPUs."""
    lines = (tree.text("/proc/stat") or "").splitlines()
    if not lines or not lines[0].startswith("cpu "):
        return None
    each = [line for line in lines[1:] if line.startswith("cpu")]
    if cpus is not None:
        names = {f"cpu{number}" for number in cpus}
        each = [line for line in each if line.split()[0] in names]
    try:
        counters = [[int(field) for field in line.split()[1:9]] for line in (lines[:1] if cpus is None else each)]
    except ValueError:
        return None
    if not counters or any(len(fields) != 8 for fields in counters):
        return None
    return tuple(map(sum, zip(*counters, strict=True))), len(each)


def between(first: tuple[Ticks, int], second: tuple[Ticks, int]) -> Load | None:
    user, nice, system, idle, waiting, irq, softirq, stolen = (
        after - before for before, after in zip(first[0], second[0], strict=True)
    )
    total = user + nice + system + idle + waiting + irq + softirq + stolen
    cpus = second[1]
    if total <= 0 or cpus < 1:
        return None
    return Load(busy=cpus * (user + nice + system + irq + softirq) / total, stolen=cpus * stolen / total, cpus=cpus)
