"""Errors that a person can cause, and that the command line answers with one sentence instead of a traceback."""

from __future__ import annotations

__all__ = ["UserError"]


class UserError(Exception):
    """Something the person asked for cannot be done; the message names it, its value, and what to do instead."""
