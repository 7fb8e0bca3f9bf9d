"""Cleaning up after a launch: its temporary directory, and the processes that its ranks have started.

A launch that fails or is interrupted ends its remaining processes. One that was killed cannot, so its forwarders
(`stoker.launch.rank.output`) end them, and the next launch of the same user removes its directory.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import signal
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["GRACE", "JOB", "directory", "end", "exempt", "is_over", "processes_of", "remove_abandoned"]

JOB = "STOKER_JOB"
"""The variable by which everything that a launch has started is found. Child processes inherit it."""
_PREFIX = "stoker-launch-"
_LOCK = "lock"
_YOUNG = 3600.0
"""Seconds for which a directory without a lock may belong to a launch that is about to lock it."""
GRACE = 3.0
"""Seconds that the processes of a job have to end after SIGTERM."""
_EXEMPT = "stoker-output"
_PR_SET_NAME = 15  # linux/prctl.h


@contextlib.contextmanager
def directory(job: str) -> Iterator[Path]:
    """A temporary directory for one launch, locked while the launch runs."""
    remove_abandoned()
    made = Path(tempfile.mkdtemp(prefix=_PREFIX))
    try:
        with open(made / _LOCK, "xb", buffering=0) as lock:
            with contextlib.suppress(OSError):  # without locks, no directory is taken for abandoned either
                fcntl.flock(lock, fcntl.LOCK_EX)
            lock.write(job.encode())
            yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def is_over(directory: Path) -> bool:
    """Whether a launch has ended by itself and removed its directory."""
    return not (directory / _LOCK).exists()


def remove_abandoned() -> None:
    """Removes the directories, and ends the processes, of this user's launches that were killed."""
    with contextlib.suppress(OSError):
        for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
            with contextlib.suppress(OSError):
                _remove_if_abandoned(path)


def _remove_if_abandoned(path: Path) -> None:
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        return
    try:
        descriptor = os.open(path / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        # Killed before it could lock it; a directory with files in it is not ours.
        if time.time() - status.st_mtime > _YOUNG:
            path.rmdir()
        return
    with open(descriptor, "rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises while the launch runs
        job = lock.read(64).decode("ascii", "replace")
        shutil.rmtree(path, ignore_errors=True)
    if len(job) >= 16 and job.isalnum():
        end(job)


def processes_of(job: str) -> list[int]:
    """The ranks of a job, found by their command line, and their children; not the forwarders of their output."""
    name, variable = job.encode(), f"{JOB}={job}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if (entry / "comm").read_text(errors="replace").strip() == _EXEMPT:
                continue
            words = (entry / "cmdline").read_bytes().split(b"\0")
            is_rank = b"stoker.launch.run" in words and name in words
            if is_rank or variable in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def end(job: str, grace: float | None = None) -> list[int]:
    """Ends the processes of a job on this machine, with SIGTERM first; returns those that were running.

    `grace`: how many seconds they have after SIGTERM, GRACE if not given.
    """
    found = processes_of(job)
    for number in (signal.SIGTERM, signal.SIGKILL):
        left = processes_of(job)
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, number)
        limit = time.monotonic() + (GRACE if grace is None else grace)
        while left and time.monotonic() < limit and processes_of(job):
            time.sleep(0.02)
    return found


def exempt() -> None:
    """Excludes this process from `end`: it ends by itself after the others."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_NAME, _EXEMPT.encode())
