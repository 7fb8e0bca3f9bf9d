"""Work that takes too much time or memory is stopped, and leaves the limits of the process as they were."""

from __future__ import annotations

import resource
import signal
import sys

import pytest

from rig import warm
from stoker.bounded import OutOfBounds, bounded


def never_end() -> None:
    while True:
        pass


def test_work_that_takes_too_long_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.bounded.SECONDS", 0.05)
    before = signal.getsignal(signal.SIGVTALRM)
    with pytest.raises(OutOfBounds, match=r"takes more than 0\.05 s"):
        bounded(never_end, memory=1 << 30, timed=True)
    assert signal.getsignal(signal.SIGVTALRM) == before
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


TOO_MUCH = """
import resource, threading
from stoker.bounded import OutOfBounds, bounded
def work():
    try:
        bounded(lambda: bytearray(1 << 30), memory=100_000_000, timed=True)
    except OutOfBounds as error:
        print(error)
before = resource.getrlimit(resource.RLIMIT_AS)
work()
thread = threading.Thread(target=work)
thread.start()
thread.join()
assert resource.getrlimit(resource.RLIMIT_AS) == before
"""


def test_work_that_takes_too_much_memory_is_stopped_in_every_thread() -> None:
    """In a process of its own, because this one may have a gigabyte that is free and mapped already."""
    done = warm.run([sys.executable, "-c", TOO_MUCH], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["needs more than 0.1 GB of memory"] * 2, done.stderr


def test_a_limit_of_the_process_is_not_raised() -> None:
    before = resource.getrlimit(resource.RLIMIT_AS)

    def limit() -> tuple[int, int]:
        return resource.getrlimit(resource.RLIMIT_AS)

    outer, inner = bounded(lambda: (limit(), bounded(limit, memory=1 << 40)), memory=1 << 30)
    assert inner == outer != before
    assert resource.getrlimit(resource.RLIMIT_AS) == before


def test_time_that_runs_out_while_an_error_is_handled_is_no_other_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.bounded.SECONDS", 0.05)

    def fail_slowly() -> None:
        try:
            raise ValueError("of the work")
        finally:
            never_end()

    with pytest.raises(OutOfBounds, match=r"takes more than 0\.05 s"):
        bounded(fail_slowly, memory=1 << 30, timed=True)
