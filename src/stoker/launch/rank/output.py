"""The output of one rank: a prefix before each line, a copy in the rank's file, progress bars of rank 0 only.

A separate small process reads the rank's pipes, so that nothing is lost when the rank crashes. It ends after the rank; it is
not a child of the rank, which must be free to wait for all of its children.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import BinaryIO, NoReturn, cast

from stoker import streams
from stoker.launch.rank import leftovers
from stoker.streams import ProgressLine

__all__ = ["Lines", "attach"]

_IDLE = 0.1
_NOT_SHOWN = b"find_unused_parameters=True was specified in DDP constructor, but did not find any unused"
"""PyTorch's advice, once per rank, about a default of transformers; a log file keeps it."""
_PATIENCE = 2.0  # after the rank's end, for what its own children still write


class Lines:
    """Turns a stream into what the screen shows: whole lines with a prefix, and progress bars only if `progress`."""

    def __init__(self, prefix: bytes, progress: bool) -> None:
        self._prefix = prefix
        self._progress = progress
        self._rest = b""
        self._bar = False
        """Whether what is in `_rest` follows a carriage return."""

    def feed(self, data: bytes) -> bytes:
        shown = []
        self._rest += data
        while self._rest:
            ends = [i for i in (self._rest.find(b"\n"), self._rest.find(b"\r")) if i >= 0]
            if not ends:
                break
            end = min(ends)
            if self._rest[end : end + 1] == b"\r" and end + 1 == len(self._rest):
                break  # a line feed may follow: then it is a line end of the other kind
            line = self._rest[end : end + 1] == b"\n" or self._rest[end : end + 2] == b"\r\n"
            size = 2 if self._rest[end : end + 2] == b"\r\n" else 1
            piece, self._rest = self._rest[:end], self._rest[end + size :]
            shown.append(self._piece(piece, line))
            self._bar = not line
        return b"".join(shown)

    def pause(self) -> bytes:
        """What can be shown when no more data arrives for a while: an unfinished progress bar."""
        if self._bar and self._progress and self._rest and not self._rest.endswith(b"\r"):
            shown, self._rest = b"\r" + self._rest, b""
            return shown
        return b""

    def end(self) -> bytes:
        rest, self._rest = self._rest, b""
        return self._piece(rest, True) if rest else b""

    def _piece(self, piece: bytes, line: bool) -> bytes:
        if _NOT_SHOWN in piece:
            return b""
        if self._bar:
            return b"\r" + piece + b"\n" * line if self._progress else b""
        if not line:
            return b"\r" + piece if self._progress and piece else b""
        return self._prefix + piece + b"\n"


def attach(
    prefix: str,
    log: Path | None,
    *,
    progress: bool,
    fresh: bool = True,
    busy: Path | None = None,
    launcher: int | None = None,
) -> int:
    """Redirects this process's output through a forwarder. `busy` is a file that exists while the forwarder works; `launcher`
    is the process that ends the launch, by default the parent of this one.

    Returns a descriptor of the original error stream. Beside `forwarding.3`, the forwarder makes `ended.3` when rank 3 ends.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    file = None
    if log is not None:
        log.parent.mkdir(parents=True, exist_ok=True)
        file = cast(BinaryIO, open(log, "wb" if fresh else "ab", buffering=0))  # noqa: SIM115
    if busy is not None:
        busy.touch()
    out, err, rank, launcher = os.pipe(), os.pipe(), os.getpid(), launcher or os.getppid()
    child = os.fork()
    if child == 0:
        if os.fork() == 0:
            _Forwarder(rank, launcher, file, prefix.encode(), progress, busy).run(out, err)
        os._exit(0)
    os.waitpid(child, 0)
    before = os.dup(2)
    os.dup2(out[1], 1)
    os.dup2(err[1], 2)
    for descriptor in (*out, *err):
        os.close(descriptor)
    if file is not None:
        file.close()
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        streams.replace(descriptor, name, line_buffering=True)
    return before


class _Forwarder:
    """The process that reads the rank's pipes and writes to the screen and the log file."""

    def __init__(
        self, rank: int, launcher: int, file: BinaryIO | None, prefix: bytes, progress: bool, busy: Path | None
    ) -> None:
        self._rank_end, self._launcher_end = _end_of(rank), _end_of(launcher)
        self._file, self._prefix, self._progress, self._busy = file, prefix, progress, busy

    def run(self, out: tuple[int, int], err: tuple[int, int]) -> NoReturn:
        try:
            for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTTOU):
                signal.signal(name, signal.SIG_IGN)
            for descriptor in (out[1], err[1]):
                os.close(descriptor)
            with contextlib.suppress(OSError):
                os.setpgid(0, 0)  # a kill of the rank's process group must not cut off its last output
            leftovers.exempt()
            self._pump({out[0]: 1, err[0]: 2})
            if self._busy is not None:
                with contextlib.suppress(OSError):
                    self._busy.unlink()
            # A launcher's end takes its ranks along a moment before it can be seen.
            if self._launcher_end is not None and select.select([self._launcher_end], [], [], 0.3)[0]:
                self._end_orphans()
        finally:
            os._exit(0)

    def _end_orphans(self) -> None:
        """The launcher has ended. If it was killed, it could not end what the rank had started."""
        job = os.environ.get(leftovers.JOB)
        if job and self._busy is not None and not leftovers.is_over(self._busy.parent):
            leftovers.end(job)

    def _pump(self, sources: dict[int, int]) -> None:
        lines = {source: Lines(self._prefix, self._progress) for source in sources}
        screens = _screens(self._busy)
        end, above = self._rank_end, self._launcher_end
        ended: float | None = None
        while sources:
            watched = [*sources, end] if ended is None and end is not None else list(sources)
            ready = select.select(watched, [], [], _IDLE)[0]
            if ended is not None and above is not None and select.select([above], [], [], 0)[0]:
                self._end_orphans()
                above = None
            if end in ready:
                ended = time.monotonic()
                if self._busy is not None:
                    with contextlib.suppress(OSError):
                        self._busy.with_stem("ended").touch()
            for source in list(sources):
                if source not in ready:
                    _show(sources[source], lines[source].pause(), screens)
                    continue
                data = os.read(source, 65536)
                if self._file is not None and data:
                    with contextlib.suppress(OSError):  # a full disk must not end the training
                        self._file.write(data)
                _show(sources[source], lines[source].feed(data) if data else lines[source].end(), screens)
                if not data:
                    del sources[source]
            if ended is not None and not ready and time.monotonic() - ended > _PATIENCE:
                break  # something the rank started holds the pipe and writes nothing
        for source, target in sources.items():
            _show(target, lines[source].end(), screens)


def _end_of(process: int) -> int | None:
    """A descriptor that can be read from once a process has ended; None on kernels before 5.3."""
    with contextlib.suppress(OSError, AttributeError):
        return os.pidfd_open(process)
    return None


def _screens(busy: Path | None) -> dict[int, ProgressLine]:
    """The state of rank 0's progress bar on either stream, which lines of all ranks must not be appended to."""
    found = {}
    for target in (1, 2):
        try:
            status = os.fstat(target)
        except OSError:
            continue
        shared = busy and busy.with_name(f"progress.{status.st_dev}.{status.st_ino}")
        found[target] = ProgressLine(shared) if shared else streams.progress_line(target)
    return found


def _show(target: int, data: bytes, screens: dict[int, ProgressLine]) -> None:
    if not data:
        return
    line = screens.get(target)
    if line is None:
        streams.write(target, data)
        return
    with line.alone():
        streams.write(target, line.before(data) + data)
