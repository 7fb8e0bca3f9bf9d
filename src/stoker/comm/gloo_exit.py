"""Lets the threads of gloo finish before Python shuts down.

A gloo thread that needs the interpreter's lock during the shutdown, for a callback or to free a tensor, aborts the process:
"terminate called without an active exception", exit code -6 after a training that succeeded. Destroying the process group joins
the threads, but DistributedDataParallel keeps its group alive. Busy machines delay a thread long enough for that.
"""

from __future__ import annotations

import atexit
import functools
import time
from contextlib import suppress
from pathlib import Path

__all__ = ["wait_at_exit"]

_TASKS = Path("/proc/self/task")
_THREAD = "(pt_gloo_runloop)"
_LOOK = 0.001
"""Seconds between two looks. Python's lock is free in between, so that a thread that waits for it gets it."""
_LONGEST = 5.0
"""Seconds after which a thread that still runs is left alone."""


@functools.cache
def wait_at_exit() -> None:
    """Has this process wait, when it ends, until no thread of gloo is running."""
    atexit.register(_wait)


def _wait() -> None:
    deadline = time.monotonic() + _LONGEST
    idle = 0
    while idle < 2 and time.monotonic() < deadline:  # a thread may have slept while it waited for Python's lock
        idle = 0 if _is_running() else idle + 1
        time.sleep(_LOOK)


def _is_running() -> bool:
    for stat in _TASKS.glob("*/stat"):
        with suppress(OSError):  # the thread has ended
            name, _, rest = stat.read_text().partition(") ")
            if f"{name})".endswith(_THREAD) and rest[:1] != "S":
                return True
    return False
