"""What else the machine is doing at this moment, from two looks at /proc/stat."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from stoker.machine.tree import Tree

__all__ = ["Load", "between", "look", "others_during", "watch"]

Ticks = tuple[int, ...]


@dataclass(frozen=True)
class Load:
    busy: float
    """CPUs' worth of work going on, of all processes."""
    stolen: float
    """CPUs' worth of time that the hypervisor gave to other virtual machines."""
    cpus: int

    @property
    def disturbs(self) -> bool:
        """Whether it is enough to slow a training down, or to spoil a measurement."""
        return self.busy > max(0.25 * self.cpus, 0.5)


def watch(seconds: float = 0.2) -> Load | None:
    """The load over the next moments; None where it cannot be told."""
    tree = Tree("/")
    first = look(tree)
    time.sleep(seconds)
    second = look(tree)
    return between(first, second) if first and second else None


def others_during() -> Callable[[], Load | None]:
    """Starts watching; the function it returns ends that, and gives the load without the work of this process."""
    tree = Tree("/")
    first, begin, own = look(tree), time.perf_counter(), time.process_time()

    def end() -> Load | None:
        second = look(tree)
        load = between(first, second) if first and second else None
        if load is None:
            return None
        mine = (time.process_time() - own) / max(time.perf_counter() - begin, 1e-9)
        return replace(load, busy=max(load.busy - mine, 0.0))

    return end


def look(tree: Tree) -> tuple[Ticks, int] | None:
    """The counters of all CPUs together, and how many CPUs there are."""
    lines = (tree.text("/proc/stat") or "").splitlines()
    if not lines or not lines[0].startswith("cpu "):
        return None
    try:
        ticks = tuple(int(field) for field in lines[0].split()[1:9])
    except ValueError:
        return None
    return (ticks, sum(line.startswith("cpu") for line in lines) - 1) if len(ticks) == 8 else None


def between(first: tuple[Ticks, int], second: tuple[Ticks, int]) -> Load | None:
    user, nice, system, idle, waiting, irq, softirq, stolen = (
        after - before for before, after in zip(first[0], second[0], strict=True)
    )
    total = user + nice + system + idle + waiting + irq + softirq + stolen
    cpus = second[1]
    if total <= 0 or cpus < 1:
        return None
    return Load(busy=cpus * (user + nice + system + irq + softirq) / total, stolen=cpus * stolen / total, cpus=cpus)
