"""Errors that a user can cause. The command line prints them as one sentence instead of a traceback."""

from __future__ import annotations

import errno
import re

__all__ = ["UserError", "first_line", "one_line", "outside_reason", "readable"]


class UserError(Exception):
    """The request cannot be carried out. The message names the option, its value, and what to do instead.

    Values come from the user and may be anything: very long ones are shortened, and control characters are escaped.
    """

    def __init__(self, message: str) -> None:
        super().__init__(readable(message))


_LONG = re.compile(r"\d{40,}|\S{1000,}")
"""What is shortened. Paths, the longest values that a user needs in full, are hardly ever this long."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""What a terminal would act on: control characters, and marks that change the text direction."""
_MOST = 2000


def readable(message: str) -> str:
    """A message with values of the user, without control characters, and short enough to read."""
    shown = _CONTROL.sub(lambda found: repr(found[0])[1:-1], message)
    shown = _LONG.sub(lambda found: f"{found[0][:20]}...({len(found[0]):,} characters)", shown)
    return shown if len(shown) <= _MOST else f"{shown[: _MOST * 2 // 3]} ... {shown[-_MOST // 4 :]}"


def first_line(error: BaseException) -> str:
    """The first line of an error's message, short enough to quote in a message of our own."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def one_line(error: BaseException) -> str:
    """The whole message of an error on one line."""
    return " ".join(str(error).split()) or type(error).__name__


def outside_reason(error: BaseException) -> str | None:
    """Why memory, a limit or the disk made an operation fail, and what to do; None for an error of any other cause."""
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error)):
        return "there is not enough memory; use smaller batches or inputs, raise the limit (ulimit -v), or free some"
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        return "no thread can be started; raise the limit on processes (ulimit -u), or end some processes"
    if not isinstance(error, OSError) or error.errno is None:
        return None
    what = f"{error.filename}: " if error.filename is not None else ""
    advice = _ADVICE.get(error.errno)
    return f"{what}{error.strerror or first_line(error)}" + (f"; {advice}" if advice else "")


_ADVICE = {
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.ENFILE: "the system-wide limit on open files is reached; close other programs",
    errno.EAGAIN: "raise the limit on processes (ulimit -u), or end some processes",
    errno.EROFS: "choose a place that can be written",
    errno.EACCES: "change its permissions, or choose another place",
}
