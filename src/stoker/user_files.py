"""Reads files that users name, within limits of size and time, and checks those that are to be replaced.

A file that cannot be read raises UserError. Pipes are supported (`-f <(make-hostfile)`), with a time limit.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import select
import stat
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from stoker.errors import UserError

__all__ = [
    "MIB",
    "check_replaceable",
    "read_bytes",
    "read_standard_input",
    "read_text",
    "require_existing",
    "require_run_folder",
    "stream_bytes",
    "too_large",
]

MIB = 1 << 20
PATIENCE = 10.0
"""Seconds to wait for the next bytes of a pipe."""


def read_text(path: str | os.PathLike[str], what: str, *, limit: int = MIB, advice: str = "") -> str:
    """The text of a file. Messages call it `what`, and add `advice` if it does not exist; ~ is the home directory."""
    raw = read_bytes(path, what, limit=limit, advice=advice)
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{what} {path} cannot be read: it is not UTF-8 text (byte {error.start:,})") from None
    if "\0" in text:
        raise UserError(f"{what} {path} cannot be read: it is not text (byte {text.index(chr(0)):,} is 0)")
    return text


def read_bytes(
    path: str | os.PathLike[str], what: str, *, limit: int, gzipped: bool = False, advice: str = ""
) -> bytes:
    """The content of a file of at most `limit` bytes, after unpacking if it is `gzipped`."""
    with _as_user_error(path, what, limit, advice):
        raw = b"".join(_chunks(os.path.expanduser(path), limit))
        if gzipped:
            with gzip.GzipFile(fileobj=io.BytesIO(raw)) as packed:
                raw = packed.read(limit + 1)
            if len(raw) > limit:
                raise _TooLarge
    return raw


def stream_bytes(path: str | os.PathLike[str], what: str, *, gzipped: bool = False) -> Iterator[bytes]:
    """The content of a file of any size, piece by piece, unpacked if it is `gzipped`. Not for pipes, which can be read once."""
    with _as_user_error(path, what), open(_regular(os.path.expanduser(path)), "rb") as file:
        source: IO[bytes] = gzip.GzipFile(fileobj=file) if gzipped else file  # type: ignore[assignment]
        while piece := source.read(MIB):
            yield piece


def _regular(path: str) -> str:
    mode = os.stat(path).st_mode
    if stat.S_ISDIR(mode):
        raise OSError("it is a folder")
    if not stat.S_ISREG(mode):
        raise OSError("it is a device, pipe or socket, not a file")
    return path


@contextlib.contextmanager
def _as_user_error(path: object, what: str, limit: int = 0, advice: str = "") -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise UserError(f"{what} {path} does not exist{advice and '; '}{advice}") from None
    except _TooLarge:
        raise too_large(path, what, limit) from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{what} {path} cannot be read: it is not a whole gzip file ({error})") from None
    except OSError as error:
        raise UserError(f"{what} {path} cannot be read: {error.strerror or error}") from None
    except ValueError:  # NUL bytes, and names that this system cannot encode
        raise UserError(f"{what} {str(path)!r} cannot be read: that is not the name of a file") from None


class _TooLarge(Exception):
    pass


def too_large(path: object, what: str, limit: int) -> UserError:
    """The error for a file that holds more than `limit` bytes; messages call it `what`."""
    size = f"{limit / 1e9:.1f} GB" if limit >= 1e9 else f"{limit / 1e6:.0f} MB"
    return UserError(f"{what} {path} cannot be read: it holds more than {size}")


def _chunks(path: str | os.PathLike[str], limit: int) -> Iterator[bytes]:
    # Non-blocking: opening a named pipe would otherwise wait for a writer.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(handle)
        if stat.S_ISDIR(status.st_mode):
            raise OSError("it is a folder")
        if not stat.S_ISREG(status.st_mode) and not stat.S_ISFIFO(status.st_mode):
            raise OSError("it is a device or socket, not a file")
        if status.st_size > limit:
            raise _TooLarge
        left = limit
        while data := _read(handle, waits=stat.S_ISFIFO(status.st_mode)):
            left -= len(data)
            if left < 0:
                raise _TooLarge
            yield data
    finally:
        os.close(handle)


def _read(handle: int, *, waits: bool) -> bytes:
    if not waits:
        return os.read(handle, MIB)
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        # `select` also returns when the pipe has no writer yet.
        if select.select([handle], [], [], max(end - time.monotonic(), 0))[0]:
            try:
                return os.read(handle, MIB)
            except BlockingIOError:
                continue
    raise OSError(f"nothing was written to this pipe for {PATIENCE:g} s")


def read_standard_input(what: str, *, limit: int) -> str:
    """The text of standard input, of at most `limit` characters; messages call it `what`."""
    try:
        text = sys.stdin.read(limit + 1)
    except UnicodeDecodeError as error:
        raise UserError(f"{what} is not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise UserError(f"{what} cannot be read: {error.strerror}") from None
    if len(text) > limit:
        raise UserError(f"{what} is longer than {limit / 1e6:.0f} MB")
    return text


def require_existing(path: str | os.PathLike[str], what: str) -> None:
    """Raises UserError for a file that does not exist. Whatever else may be wrong is left to whoever reads it."""
    try:
        os.stat(os.path.expanduser(path))
    except FileNotFoundError:
        raise UserError(f"{what} {path} does not exist") from None
    except (OSError, ValueError):
        return


def require_run_folder(folder: Path) -> None:
    """Raises UserError unless this is a folder."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; name the folder of a run, its --output_dir")
    if not folder.is_dir():
        raise UserError(f"the folder {folder} does not exist")


def check_replaceable(path: str | os.PathLike[str], what: str) -> Path:
    """The path to write, with links resolved. Raises UserError for a folder, a device or a pipe, which must not be replaced."""
    try:
        target = Path(os.path.realpath(path))
        if not str(path) or target.is_dir():
            raise UserError(f"{what} {str(path)!r} cannot be written: name a file, not a folder")
        if target.exists() and not target.is_file():
            raise UserError(f"{what} {path} cannot be written: it is a device or pipe, not a file")
    except OSError as error:
        raise UserError(f"{what} {path} cannot be written: {error.strerror}") from None
    except ValueError:
        raise UserError(f"{what} {str(path)!r} cannot be written: that is not the name of a file") from None
    return target
