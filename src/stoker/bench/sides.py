"""Measures several sides of a comparison in one run: each side in a process of its own, steps taken in turn.

A process of its own because allocator settings and thread pools are process-wide; in turn because a shared machine runs at
half speed a minute later, and then all sides must suffer alike. A side is a function that builds its state and returns a
function of the step number, which may return its loss; only one process computes at any time, the others wait at a pipe.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import resource
import signal
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

__all__ = ["Measured", "Side", "SideFailed", "Step", "Taken", "measure", "without_interrupts"]

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

    def add(self, taken: Taken) -> None:
        self.seconds.append(taken.seconds)
        self.losses += [] if taken.value is None else [taken.value]
        self.faults.append(taken.faults)
        self.peak_bytes = taken.peak_bytes

    def to_dict(self) -> dict[str, Any]:
        return {
            "median_seconds": self.median,
            "seconds": self.seconds,
            "losses": self.losses,
            "faults_per_step": statistics.median(self.faults) if self.faults else None,
            "peak_bytes": self.peak_bytes,
            "note": self.note,
        }


@dataclass(frozen=True)
class Taken:
    """One step of one side."""

    seconds: float
    cpu_seconds: float
    """Of the whole process since it started."""
    faults: int
    peak_bytes: int
    value: Any
    """What the step returned."""


class SideFailed(Exception):
    """The side raised an error, or its process ended; the message is the reason in one sentence."""


class Side:
    """A process that builds a step, and takes it when asked. It starts at once; `wait_until_built` before the first step."""

    def __init__(self, build: Callable[[], Callable[[Any], Any]], method: str = "spawn") -> None:
        """`method`: how multiprocessing starts the process."""
        context: Any = multiprocessing.get_context(method)
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(build, theirs), daemon=True)
        with without_interrupts():  # Ctrl-C is for this process, which then ends the sides
            self.process.start()
        theirs.close()
        self.cpu_seconds = 0.0
        """As of its last answer."""

    def wait_until_built(self, timeout: float | None = None) -> None:
        self.cpu_seconds = self._receive(timeout)

    def take(self, argument: Any, timeout: float | None = None) -> Taken:
        """The step with this argument."""
        self.begin(argument)
        return self.end(timeout)

    def begin(self, argument: Any) -> None:
        try:
            self._pipe.send(argument)
        except OSError:
            raise SideFailed(_DIED) from None

    def end(self, timeout: float | None = None) -> Taken:
        taken = Taken(*self._receive(timeout))
        self.cpu_seconds = taken.cpu_seconds
        return taken

    def _receive(self, timeout: float | None) -> Any:
        try:
            if timeout is not None and not self._pipe.poll(timeout):
                raise SideFailed(f"it did not answer for {timeout:.0f} s")
            answer = self._pipe.recv()
        except (EOFError, OSError):
            raise SideFailed(_DIED) from None
        if isinstance(answer, str):
            raise SideFailed(answer)
        return answer

    def close(self, patience: float = 10.0) -> None:
        """Ends the process, by force if it takes longer than `patience`."""
        with contextlib.suppress(OSError):  # of a process that died after its last step
            self._pipe.send(None)
        if patience:
            self.process.join(patience)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(10)
        self._pipe.close()


_DIED = "its process died (out of memory?)"


@contextlib.contextmanager
def without_interrupts() -> Iterator[None]:
    """Processes that start meanwhile never receive SIGINT."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def measure(
    sides: dict[str, Callable[[], Step]], steps: int, warm_up: int = 2, say: Callable[[str], None] = print
) -> dict[str, Measured]:
    """Runs `steps` timed steps of every side, in turn; step n of every side sees the same n."""
    started: list[Side] = []
    running: dict[str, Side] = {}
    results = {name: Measured() for name in sides}
    for name, build in sides.items():
        side = Side(build)
        started.append(side)
        try:  # built and warmed up before the next side starts
            side.wait_until_built()
            for number in range(warm_up):
                side.take(number)
            running[name] = side
        except SideFailed as failure:
            results[name].note = str(failure)
            say(f"  {name}: left out: {failure}")
    for number in range(warm_up, warm_up + steps):
        for name, side in list(running.items()):
            try:
                results[name].add(side.take(number))
            except SideFailed as failure:  # the others are still worth having
                results[name].note = str(failure)
                del running[name]
                say(f"  {name}: ended at step {number - warm_up + 1}: {failure}")
        say(
            f"  step {number - warm_up + 1}/{steps}: "
            + ", ".join(f"{n} {results[n].seconds[-1]:.3f} s" for n in running)
        )
    for side in started:
        side.close()
    return results


def _serve(build: Callable[[], Callable[[Any], Any]], pipe: Connection) -> None:
    try:
        step = build()
        pipe.send(time.process_time())
        while (argument := pipe.recv()) is not None:
            faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            begin = time.perf_counter()
            value = step(argument)
            seconds = time.perf_counter() - begin
            usage = resource.getrusage(resource.RUSAGE_SELF)
            spent = time.process_time()
            # A tuple, because a class could not be pickled after `benchmarks/train_step.py --before` has removed its module.
            pipe.send((seconds, spent, usage.ru_minflt - faults, usage.ru_maxrss * 1024, value))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the process that asked has ended
    except Exception as error:
        traceback.print_exc()
        with contextlib.suppress(OSError):
            pipe.send(f"{type(error).__name__}: {error}")
