"""Combines Stoker's Trainer and arguments with those of another library by inheritance."""

from __future__ import annotations

__all__ = ["bases"]


def bases(ours: type, theirs: type) -> tuple[type, ...]:
    """Both, or theirs alone: under `stoker launch`, Stoker's class is already a base of every class of the other library."""
    return (theirs,) if issubclass(theirs, ours) else (ours, theirs)
