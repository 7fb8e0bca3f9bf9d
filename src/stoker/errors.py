"""Errors that a person can cause, and that the command line answers with one sentence instead of a traceback."""

from __future__ import annotations

import errno
import re

__all__ = ["UserError", "first_line", "outside_reason"]


class UserError(Exception):
    """Something the person asked for cannot be done; the message names it, its value, and what to do instead.

    The value may be anything. Very long ones are cut, and control characters are shown as escapes.
    """

    def __init__(self, message: str) -> None:
        super().__init__(_readable(message))


_LONG = re.compile(r"\d{40,}|\S{1000,}")
"""Paths, the longest words that a person may need in full, are hardly ever this long."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""What makes a terminal do something: control characters, and marks that change the direction of writing."""
_MOST = 2000


def _readable(message: str) -> str:
    shown = _CONTROL.sub(lambda found: repr(found[0])[1:-1], message)
    shown = _LONG.sub(lambda found: f"{found[0][:20]}...({len(found[0]):,} characters)", shown)
    return shown if len(shown) <= _MOST else f"{shown[: _MOST * 2 // 3]} ... {shown[-_MOST // 4 :]}"


def first_line(error: BaseException) -> str:
    """What an error of another library says, short enough for a sentence of ours."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def outside_reason(error: BaseException) -> str | None:
    """What memory, limits or a disk refused, and what to do about it; None for an error of any other cause."""
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error)):
        return "there is not enough memory; use smaller batches or inputs, raise the limit (ulimit -v), or free some"
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        return "no thread can be started; raise the limit on processes (ulimit -u), or end some"
    if not isinstance(error, OSError) or error.errno is None:
        return None
    what = f"{error.filename}: " if error.filename is not None else ""
    advice = _ADVICE.get(error.errno)
    return f"{what}{error.strerror or first_line(error)}" + (f"; {advice}" if advice else "")


_ADVICE = {
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.ENFILE: "this system has no more open files to give; end other programs",
    errno.EAGAIN: "raise the limit on processes (ulimit -u), or end some",
    errno.EROFS: "write elsewhere",
    errno.EACCES: "change its permissions, or name another place",
}
