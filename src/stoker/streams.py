"""Standard output and error for a process that must not fail when they cannot be written.

`keep_running` installs streams that drop what cannot be written: the reader has exited, the disk is full, or the terminal was
closed. Commands whose output is their result keep Python's own standard output, which reports such errors.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import mmap
import os
import re
import select
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

__all__ = [
    "ProgressLine",
    "above_progress_bars",
    "drops_output",
    "keep_running",
    "open_closed",
    "progress_line",
    "replace",
    "write",
]

_GONE = (errno.EPIPE, errno.EIO, errno.ECONNRESET)  # EIO: the terminal was closed
_ESCAPES = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")


class _Byte(Protocol):
    def __getitem__(self, index: int, /) -> int: ...
    def __setitem__(self, index: int, value: int, /) -> None: ...


class ProgressLine:
    """Tracks whether the last line on the screen is a progress bar, so that the next line of text starts on a new line.

    `shared` is a file in which processes that write to the same screen share this state.
    """

    def __init__(self, shared: Path | None = None) -> None:
        self._drawn: _Byte = bytearray(1)
        self._shared: int | None = None
        if shared is not None:
            with contextlib.suppress(OSError, ValueError):
                self._shared = os.open(shared, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                os.ftruncate(self._shared, 1)
                self._drawn = mmap.mmap(self._shared, 1)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Keeps the other processes that share this state from writing: a pipe splits lines of more than 4 KB otherwise."""
        if self._shared is None:
            yield
            return
        fcntl.flock(self._shared, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._shared, fcntl.LOCK_UN)

    def before(self, data: bytes) -> bytes:
        """What to write before `data`: a newline, if `data` would otherwise continue the line of a progress bar."""
        if not data:
            return b""
        # Bars start with a carriage return, or move the cursor first.
        end = b"\n" if self._drawn[0] and not data.startswith((b"\r", b"\n", b"\x1b")) else b""
        breaks = data.replace(b"\r\n", b"\n")
        last = max(breaks.rfind(b"\n"), breaks.rfind(b"\r"))
        if last >= 0 or end:
            rest = _ESCAPES.sub(b"", breaks[last + 1 :]).strip()
            self._drawn[0] = int(bool(rest) and breaks[last : last + 1] == b"\r")
        return end


@contextlib.contextmanager
def above_progress_bars() -> Iterator[None]:
    """Clears tqdm's bars, if there are any, while a line is written to standard error, and draws them again below it."""
    tqdm = sys.modules.get("tqdm")  # who has not imported it has no bars
    bars = contextlib.nullcontext() if tqdm is None else tqdm.tqdm.external_write_mode(file=sys.stderr)
    with bars:
        yield


_lines: dict[tuple[int, int], ProgressLine] = {}


def progress_line(descriptor: int) -> ProgressLine:
    """The state of the screen or file behind `descriptor`; standard output and error often share it."""
    try:
        found = os.fstat(descriptor)
    except OSError:
        return ProgressLine()
    return _lines.setdefault((found.st_dev, found.st_ino), ProgressLine())


def write(descriptor: int, data: bytes | memoryview) -> None:
    """Writes all of `data`, or drops what cannot be written."""
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:  # another program has made a shared terminal or pipe non-blocking
            select.select([], [descriptor], [])
        except OSError as error:
            if error.errno in _GONE:
                _redirect_to_null(descriptor)  # also for other writers in this process and for its children
            return


def _redirect_to_null(descriptor: int) -> None:
    with contextlib.suppress(OSError):
        null = os.open(os.devnull, os.O_RDWR)
        if null == descriptor:
            os.set_inheritable(descriptor, True)
            return
        os.dup2(null, descriptor)
        os.close(null)


class _Descriptor(io.FileIO):
    """Standard output or error. Unbuffered, so that a signal handler may print while something else does."""

    def __init__(self, descriptor: int, name: str) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self.name = name
        self._line = progress_line(descriptor)

    def write(self, data: Any, /) -> int:
        view = memoryview(data).cast("B")
        descriptor = self.fileno()
        if end := self._line.before(bytes(view)):
            write(descriptor, end)
        write(descriptor, view)
        return len(view)

    def seekable(self) -> bool:
        return False  # TextIOWrapper would keep calling tell(), which fails after a pipe has replaced the file


def open_closed() -> None:
    """Opens /dev/null for each closed standard stream; otherwise the next opened file would get its descriptor."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            _redirect_to_null(descriptor)
        if getattr(sys, name) is None:
            stream = open(descriptor, "w" if descriptor else "r", encoding="utf-8", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


def keep_running(*, output: bool = True) -> None:
    """From now on, drops what cannot be written to standard error, and to standard output if `output`."""
    open_closed()
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        if (output or name == "stderr") and not isinstance(_buffer(name), _Descriptor):
            replace(descriptor, name)


def drops_output() -> bool:
    """Whether writing to standard output cannot fail."""
    return isinstance(_buffer("stdout"), _Descriptor)


def replace(descriptor: int, name: str, *, line_buffering: bool | None = None) -> None:
    """Replaces `sys.<name>` if it is Python's own stream; needed once its descriptor has been redirected."""
    before = getattr(sys, name)
    try:
        own = isinstance(before, io.TextIOWrapper) and before.fileno() == descriptor
    except (OSError, ValueError):
        own = False
    if not own:  # replaced by someone else, such as pytest
        return
    with contextlib.suppress(OSError):
        before.flush()
    stream = io.TextIOWrapper(
        _Descriptor(descriptor, f"<{name}>"),  # type: ignore[arg-type]  # as Python does itself under -u
        encoding=before.encoding,
        errors=before.errors,
        line_buffering=before.line_buffering if line_buffering is None else line_buffering,
        write_through=before.write_through,
    )
    setattr(sys, name, stream)
    setattr(sys, f"__{name}__", stream)


def _buffer(name: str) -> Any:
    return getattr(getattr(sys, name), "buffer", None)
