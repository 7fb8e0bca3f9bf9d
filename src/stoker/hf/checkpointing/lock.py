"""One run per output folder: a lock on a file in it, which the system takes away when the process ends, however it ends.

Where locking cannot work (a read-only folder, a file system without locks), a run goes on without it. Nothing here waits.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from stoker.errors import UserError

__all__ = ["NAME", "Lock", "take"]

NAME = "_stoker.lock"
"""Begins with an underscore, because what does is not pushed to the hub."""

_HELD_ELSEWHERE = (errno.EWOULDBLOCK, errno.EAGAIN)


@dataclass
class _Held:
    descriptor: int
    users: int


_HELD: dict[Path, _Held] = {}
"""The locks of this process. A Trainer inside `stoker train` takes the same one again."""


class Lock:
    """A lock that was taken; or the leave to go on without one."""

    def __init__(self, file: Path | None) -> None:
        self._file = file

    def release(self) -> None:
        """Gives it back; twice does nothing."""
        file, self._file = self._file, None
        held = _HELD.get(file) if file is not None else None
        if file is None or held is None:  # or this is a fork of the process that took it
            return
        held.users -= 1
        if held.users == 0:
            del _HELD[file]
            # Removed while it is still locked: whoever opened it meanwhile finds that it is no longer the file of that name.
            with contextlib.suppress(OSError):
                file.unlink()
            os.close(held.descriptor)


def take(folder: Path) -> Lock:
    """Locks `folder` for this process; UserError if another run has it."""
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    file = folder.resolve() / NAME
    if file in _HELD:
        _HELD[file].users += 1
        return Lock(file)
    descriptor = _locked(file)
    if descriptor is None:
        return Lock(None)
    _describe(descriptor)
    _HELD[file] = _Held(descriptor, 1)
    return Lock(file)


def _locked(file: Path) -> int | None:
    """An open, locked descriptor of `file`; None if locking does not work there."""
    while True:
        try:
            # Not through a link that somebody has put there, and without waiting for the other end of a pipe.
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
        except OSError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), os.stat(file)):
                return descriptor
        except FileNotFoundError:
            pass  # the run before has just ended, and removed it
        except OSError as error:
            holder = _holder(descriptor)
            os.close(descriptor)
            if error.errno in _HELD_ELSEWHERE:
                raise UserError(_sentence(file, holder)) from None
            return None
        os.close(descriptor)


def _describe(descriptor: int) -> None:
    """Who has it, for the sentence that another run gets."""
    about = {"process": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M")}
    with contextlib.suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(about).encode(), 0)


def _holder(descriptor: int) -> str:
    try:
        about = json.loads(os.pread(descriptor, 1000, 0))
        return f"process {int(about['process'])} on {str(about['host'])[:100]}, since {str(about['since'])[:20]}"
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return "another process"


def _sentence(file: Path, holder: str) -> str:
    return (
        f"another run is training in {file.parent} ({holder}); two runs would overwrite each other's checkpoints there. Wait "
        f"until it has ended, or give another --output_dir (if its machine has died, delete {file})"
    )


def _forget_in_child() -> None:
    """A forked worker (of a DataLoader) must not keep the lock of a run that was killed."""
    for held in _HELD.values():
        with contextlib.suppress(OSError):
            os.close(held.descriptor)
    _HELD.clear()


os.register_at_fork(after_in_child=_forget_in_child)
