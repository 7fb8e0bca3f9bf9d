"""Limits the CPU time and the memory of a piece of work that other people's files decide about, such as their chat templates."""

from __future__ import annotations

import contextlib
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

__all__ = ["SECONDS", "OutOfBounds", "bounded"]

SECONDS = 5.0
"""CPU time of work that is `timed`. The chat templates of published models need about a millisecond for a chat."""

T = TypeVar("T")


class OutOfBounds(Exception):
    """The work took more time or memory than it was allowed; the message says which, as the end of a sentence."""


class _TimeUp(BaseException):
    """Not an Exception: Jinja ignores those while it compiles a template."""


def bounded(work: Callable[[], T], *, memory: int, timed: bool = False) -> T:
    """What `work` returns. OutOfBounds if it allocates more than `memory` bytes or, if `timed`, takes more than SECONDS.

    The time is limited in the main thread only, where Python handles signals. Other threads should be idle: both limits count
    what they use, too. CPU time, so that a busy machine or a stopped process changes nothing.
    """
    timed = timed and threading.current_thread() is threading.main_thread()
    with _limited_memory(memory):
        try:
            return _limited_in_time(work) if timed else work()
        except MemoryError:
            raise OutOfBounds(f"needs more than {memory / 1e9:.1f} GB of memory") from None


@contextlib.contextmanager
def _limited_memory(memory: int) -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    most = pages * resource.getpagesize() + memory
    if limits[0] != resource.RLIM_INFINITY:
        most = min(most, limits[0])
    resource.setrlimit(resource.RLIMIT_AS, (most, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def _limited_in_time(work: Callable[[], T]) -> T:
    def stop(*_: object) -> None:
        raise _TimeUp

    previous = signal.signal(signal.SIGVTALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
        try:
            return work()
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)  # the signal may still arrive here, where it is caught below
    except _TimeUp:
        raise OutOfBounds(f"takes more than {SECONDS:g} s") from None
    finally:
        signal.signal(signal.SIGVTALRM, previous)
