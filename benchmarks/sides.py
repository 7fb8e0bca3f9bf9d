"""Measures several sides of a comparison in one run: each side in a process of its own, steps taken in turn.

A process of its own because allocator settings and thread pools are process-wide; in turn because a shared machine runs at
half speed a minute later, and then all sides must suffer alike. A side is a function that builds its state and returns a
function of the step number, which may return its loss; only one process computes at any time, the others wait at a pipe.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import resource
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

__all__ = ["Measured", "Step", "measure"]

Step = Callable[[int], float | None]


@dataclass
class Measured:
    """What one side took."""

    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    """What the steps returned, if they did."""
    faults: list[int] = field(default_factory=list)
    """Minor page faults of each step."""
    peak_bytes: int = 0
    """Largest resident size of the process, libraries included."""
    note: str = ""
    """Why the side has no figures, if it has none."""

    @property
    def median(self) -> float:
        return statistics.median(self.seconds) if self.seconds else float("nan")

    def faster_than(self, other: Measured) -> float:
        """The median over steps of the ratio within a step, whose batch is the same on every side and the machine nearly so."""
        ratios = [
            theirs / mine for theirs, mine in zip(other.seconds, self.seconds, strict=False)
        ]  # a side may end early
        return statistics.median(ratios) if ratios else float("nan")

    def to_dict(self) -> dict[str, Any]:
        return {
            "median_seconds": self.median,
            "seconds": self.seconds,
            "losses": self.losses,
            "faults_per_step": statistics.median(self.faults) if self.faults else None,
            "peak_bytes": self.peak_bytes,
            "note": self.note,
        }


def measure(
    sides: dict[str, Callable[[], Step]], steps: int, warm_up: int = 2, say: Callable[[str], None] = print
) -> dict[str, Measured]:
    """Runs `steps` timed steps of every side, in turn; step n of every side sees the same n."""
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, Connection] = {}
    processes = []
    results = {name: Measured() for name in sides}
    for name, build in sides.items():
        here, there = context.Pipe()
        process = context.Process(target=_serve, args=(build, there), daemon=True)
        process.start()
        there.close()
        pipes[name] = here
        processes.append(process)
        answer = _ask(here, warm_up)  # built and warmed up before the next side starts
        if isinstance(answer, str):
            results[name].note = answer
            del pipes[name]
            say(f"  {name}: left out: {answer}")
    for number in range(warm_up, warm_up + steps):
        for name, pipe in list(pipes.items()):
            answer = _ask(pipe, number)
            if isinstance(answer, str):  # the others are still worth having
                results[name].note = answer
                del pipes[name]
                say(f"  {name}: ended at step {number - warm_up + 1}: {answer}")
                continue
            seconds, faults, peak, loss = answer
            results[name].seconds.append(seconds)
            results[name].losses += [] if loss is None else [loss]
            results[name].faults.append(faults)
            results[name].peak_bytes = peak
        say(
            f"  step {number - warm_up + 1}/{steps}: " + ", ".join(f"{n} {results[n].seconds[-1]:.3f} s" for n in pipes)
        )
    for pipe in pipes.values():
        with contextlib.suppress(OSError):  # of a process that died after its last step
            pipe.send(None)
    for process in processes:
        process.join(10)
    return results


def _ask(pipe: Connection, number: int) -> Any:
    try:
        pipe.send(number)
        return pipe.recv()
    except (EOFError, OSError):
        return "its process died (out of memory?)"


def _serve(build: Callable[[], Step], pipe: Connection) -> None:
    try:
        warm_up = pipe.recv()
        step = build()
        for number in range(warm_up):
            step(number)
        pipe.send(True)
        while (number := pipe.recv()) is not None:
            faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            begin = time.perf_counter()
            loss = step(number)
            seconds = time.perf_counter() - begin
            usage = resource.getrusage(resource.RUSAGE_SELF)
            pipe.send((seconds, usage.ru_minflt - faults, usage.ru_maxrss * 1024, loss))
    except Exception as error:
        traceback.print_exc()
        pipe.send(f"{type(error).__name__}: {error}")
