"""The keeper of a rank under `stoker launch --heal`: a small process that starts the rank's process, and another one in its place
if it is killed in training.

To torchrun's agent the keeper is the rank: it ends when the rank ends, in the same way. A rank that is killed outside of
training, or that ends with an error, is not replaced; then the agent does what it does without healing.

    keeper ── rank                         the first process
           └─ warm keeper ── rank          once the rank trains: it has imported what the rank has imported, and waits;
                                           processes that replace the rank are forked from it
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn, TypeVar

from stoker.distributed.lost_rank import HEAL, LostRank, is_replaceable
from stoker.distributed.preload import Preload

__all__ = ["keep"]

_FAILED_STARTS = 3
"""How many processes are started for a lost rank if each is killed before it has joined the other ranks."""
_POLL = 0.5
"""Seconds between looks whether the rank has begun to train."""
_PATIENCE = 120.0
"""Seconds in which a warm keeper must answer. It may be in the middle of an import, which takes long on a busy machine."""
_PR_SET_NAME = 15  # linux/prctl.h
_NAME = "stoker-keeper"
_READY = b"r"
_RESTARTED_THREADS = ("jemalloc_bg_thd",)
"""Threads that their library starts again after a fork: pyarrow's allocator."""

_Prepared = TypeVar("_Prepared")


def keep(rank: int, directory: Path, prepare: Callable[[], _Prepared]) -> _Prepared | None:
    """Returns in each new process of the rank. The calling process stays its keeper and ends as the last of them ends.

    `directory` is the launch's own, where ranks say that they can be replaced. `prepare` does what has to be done before
    anything is imported; it is called for processes that start warm, whose call of `keep` returns its result. Others get None.
    """
    stopping = _Stopping()
    pid = _start(stopping, directory, None)
    if pid == 0:
        return None
    warm = None
    if (preload := _await_training(pid, directory, rank)) is not None:
        ours, theirs = socket.socketpair()
        warm_pid = os.fork()
        if warm_pid == 0:
            ours.close()
            prepared = _warm_up(theirs, preload, prepare)
            (directory / f"warm.{rank}").touch()
            return prepared if _replace(rank, directory, _lost_rank(theirs), stopping) else None
        theirs.close()
        warm = _WarmKeeper(warm_pid, ours)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    replaces = not _is_final(code, stopping)
    if not replaces or not is_replaceable(directory, rank, pid):
        if warm is not None:
            warm.end()
        if replaces:
            _refuse(rank, code, "it was not in the training loop of a Trainer that can replace ranks")
        _end_like(code)
    lost = LostRank(-code, time.monotonic())
    if warm is not None and warm.takes_over(lost):
        _end_like(os.waitstatus_to_exitcode(os.waitpid(warm.pid, 0)[1]))
    _replace(rank, directory, lost, stopping)
    return None


def _await_training(pid: int, directory: Path, rank: int) -> Preload | None:
    """Waits until the rank trains, and returns what it has imported; None if it has ended before."""
    try:
        end = os.pidfd_open(pid)
    except (OSError, AttributeError):  # kernels before 5.3
        return None
    try:
        while not select.select([end], [], [], _POLL)[0]:
            if (found := Preload.read(directory, rank)) is not None:
                return found
        return None
    finally:
        os.close(end)


def _replace(rank: int, directory: Path, lost: LostRank, stopping: _Stopping) -> bool:
    """Starts a process in place of a lost one, and again if that one is lost. Returns, with True, in each new process."""
    starts = 0
    """Processes that have been started since the last one that was in training."""
    while True:
        pid = _start(stopping, directory, lost)
        if pid == 0:
            return True
        starts += 1
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if _is_final(code, stopping):
            _end_like(code)
        if is_replaceable(directory, rank, pid):
            starts = 0
        elif starts >= _FAILED_STARTS:
            _refuse(rank, code, f"{starts} processes in a row were killed before they had joined the other ranks")
        lost = LostRank(-code, time.monotonic())


def _is_final(code: int, stopping: _Stopping) -> bool:
    """Whether a rank that ended so is not replaced: it was not killed, or somebody wants it to end."""
    return code >= 0 or stopping.requested or -code in (signal.SIGTERM, signal.SIGINT)


def _start(stopping: _Stopping, directory: Path, lost: LostRank | None) -> int:
    """Forks a process for the rank: 0 in that process, its id in the keeper."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        stopping.restore_handlers()
        _rename_process(stopping.process_name)
        os.environ[HEAL] = str(directory)
        if lost is not None:
            lost.tell_replacement()
    else:
        _rename_process(_NAME)
    return pid


@dataclass(frozen=True)
class _WarmKeeper:
    """The keeper's side of the process that has imported everything in advance."""

    pid: int
    connection: socket.socket

    def takes_over(self, lost: LostRank) -> bool:
        """Has it start a process in place of a lost one. False if it cannot, in which case it has ended."""
        with contextlib.suppress(OSError):
            self.connection.sendall(lost.to_json().encode() + b"\n")
            self.connection.settimeout(_PATIENCE)
            if self.connection.recv(1) == _READY:
                return True
        self.end()
        return False

    def end(self) -> None:
        os.kill(self.pid, signal.SIGKILL)  # not waited for yet, so no other process has its id
        os.waitpid(self.pid, 0)


def _warm_up(connection: socket.socket, preload: Preload, prepare: Callable[[], _Prepared]) -> _Prepared:
    """Imports what the rank has imported, until a process is needed. Ends this process if none could be forked from it then."""
    _rename_process(_NAME)
    streams = [os.dup(descriptor) for descriptor in (1, 2)]
    nothing = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(nothing, descriptor)  # the rank has printed it already
    try:
        prepared = prepare()
        preload.load(lambda: not select.select([connection], [], [], 0)[0])
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        os._exit(1)
    if _has_other_threads():
        os._exit(1)
    for descriptor, stream in zip((1, 2), streams, strict=True):
        os.dup2(stream, descriptor)
        os.close(stream)
    os.close(nothing)
    gc.collect()
    gc.freeze()  # a collection in a forked process would copy the pages of everything imported
    return prepared


def _has_other_threads() -> bool:
    """Whether a module has started a thread, which would be missing after a fork."""
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return len([name for name in names if name not in _RESTARTED_THREADS]) > 1


def _lost_rank(connection: socket.socket) -> LostRank:
    """Waits for the order to start a process. Ends this process if there will be none."""
    text = b""
    while not text.endswith(b"\n"):
        received = connection.recv(4096)
        if not received:
            os._exit(0)
        text += received
    connection.sendall(_READY)
    connection.close()
    return LostRank.from_json(text.decode())


class _Stopping:
    """Whether this process has received SIGTERM or SIGINT. The rank receives them too, and ends in its own time.

    A process that is forked from a keeper becomes again what the keeper was before.
    """

    def __init__(self) -> None:
        self.requested = False
        self.process_name = "python"
        """Before this process became a keeper."""
        with contextlib.suppress(OSError):
            self.process_name = Path("/proc/self/comm").read_text().strip()
        self._before = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.requested = True

    def restore_handlers(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def _rename_process(name: str) -> None:
    """So that `ps -o comm` shows which processes of a rank are keepers."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode())


def _refuse(rank: int, code: int, reason: str) -> NoReturn:
    print(
        f"stoker: rank {rank} was killed by signal {-code} and is not replaced: {reason}", file=sys.stderr, flush=True
    )
    _end_like(code)


def _end_like(code: int) -> NoReturn:
    """Ends this process as the rank has ended: with an exit code, or by a signal (a negative number)."""
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the rank has written its own core file
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
        code = 128 - code
    os._exit(code)
