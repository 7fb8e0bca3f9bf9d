"""Errors that a person can cause, and that the command line answers with one sentence instead of a traceback."""

from __future__ import annotations

import re

__all__ = ["UserError", "first_line"]


class UserError(Exception):
    """Something the person asked for cannot be done; the message names it, its value, and what to do instead.

    The value may be anything. Very long ones are cut, and control characters are shown as escapes.
    """

    def __init__(self, message: str) -> None:
        super().__init__(_readable(message))


_LONG = re.compile(r"\d{40,}|\S{1000,}")
"""Paths, the longest words that a person may need in full, are hardly ever this long."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


def _readable(message: str) -> str:
    shown = _CONTROL.sub(lambda found: repr(found[0])[1:-1], message)
    return _LONG.sub(lambda found: f"{found[0][:20]}...({len(found[0]):,} characters)", shown)


def first_line(error: BaseException) -> str:
    """What an error of another library says, short enough for a sentence of ours."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
