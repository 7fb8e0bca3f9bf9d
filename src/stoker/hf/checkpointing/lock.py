"""One run per output folder: a lock on a file in it, which the kernel releases when the process ends, however it ends.

Where locking is impossible (a read-only folder, a file system without locks), a run continues without it. Nothing waits.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from stoker.errors import UserError

__all__ = ["NAME", "Lock", "only_run_in", "take"]

log = logging.getLogger("stoker")

NAME = "_stoker.lock"
"""Files that begin with an underscore are not pushed to the hub."""

_HELD_ELSEWHERE = (errno.EWOULDBLOCK, errno.EAGAIN)


@dataclass
class _Held:
    descriptor: int
    users: int


_HELD: dict[Path, _Held] = {}
"""The locks of this process, by file. A Trainer inside `stoker train` takes the same one again."""


class Lock:
    """A lock that is held, or nothing where locking is impossible."""

    def __init__(self, file: Path | None) -> None:
        self._file = file

    def release(self) -> None:
        """Releases it; calling it again does nothing."""
        file, self._file = self._file, None
        held = _HELD.get(file) if file is not None else None
        if file is None or held is None:  # or this is a fork of the process that took it
            return
        held.users -= 1
        if held.users == 0:
            del _HELD[file]
            # Removed while it is still locked: a process that has opened it will find that the file of that name is another.
            with contextlib.suppress(OSError):
                file.unlink()
            os.close(held.descriptor)


@contextlib.contextmanager
def only_run_in(folder: Path, *, restarted: bool = False) -> Iterator[None]:
    """Keeps other runs out of `folder`; UserError if one is training there. All ranks must enter it.

    `restarted`: an agent has restarted the ranks. On a network file system the lock of a machine that has died may outlive
    it, and must not end the run that continues without that machine.
    """
    from stoker.distributed.agreement import from_first_rank, is_first_rank  # needs torch, which a lock alone does not

    held, refusal = Lock(None), None
    if is_first_rank():
        try:
            held = take(folder)
        except UserError as error:
            refusal = str(error)
    refusal = from_first_rank(refusal)
    if refusal is not None and not restarted:
        raise UserError(refusal)
    if refusal is not None and is_first_rank():
        log.warning("%s; this run was restarted, so it continues", refusal)
    try:
        yield
    finally:
        held.release()


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
            # Does not follow a link, and does not block if the file is a pipe.
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
        except OSError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), os.stat(file)):
                return descriptor
        except FileNotFoundError:
            pass  # the previous run has just ended and removed it
        except OSError as error:
            holder = _holder(descriptor)
            os.close(descriptor)
            if error.errno in _HELD_ELSEWHERE:
                raise UserError(_refusal(file, holder)) from None
            return None
        os.close(descriptor)


def _describe(descriptor: int) -> None:
    """Writes who holds it, for the message of another run."""
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


def _refusal(file: Path, holder: str) -> str:
    return (
        f"another run is training in {file.parent} ({holder}); two runs would overwrite each other's checkpoints there. Wait "
        f"until it has ended, or give another --output_dir (if its machine has died, delete {file})"
    )


def _close_in_child() -> None:
    """A forked DataLoader worker must not keep the lock of a run that was killed."""
    for held in _HELD.values():
        with contextlib.suppress(OSError):
            os.close(held.descriptor)
    _HELD.clear()


os.register_at_fork(after_in_child=_close_in_child)
