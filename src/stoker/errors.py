"""Errors that a person can cause, and that the command line answers with one sentence instead of a traceback."""

from __future__ import annotations

__all__ = ["UserError", "first_line"]


class UserError(Exception):
    """Something the person asked for cannot be done; the message names it, its value, and what to do instead."""


def first_line(error: BaseException) -> str:
    """What an error of another library says, short enough for a sentence of ours."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
