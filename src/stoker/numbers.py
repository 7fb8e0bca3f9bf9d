"""Numbers as people write them, in options, config files, hostfiles and variables: the one place where they are read.

Python's own `float` takes `inf` and `nan`, and its `int` takes numbers beyond 64 bits and raises for more than 4,300 digits. No
setting means any of these.
"""

from __future__ import annotations

import math
import re

__all__ = ["finite_number", "whole_number"]

_WHOLE = re.compile(r"[+-]?[0-9](?:_?[0-9]){0,17}")
"""What fits into 64 bits, which torch, numpy and the operating system count with."""


def whole_number(text: str) -> int | None:
    """The whole number that a text stands for; None if it is none, or too large for anything to be counted with."""
    text = text.strip()
    return int(text) if _WHOLE.fullmatch(text) else None


def finite_number(text: str) -> float | None:
    """The number that a text stands for; None if it is none, infinite or not a number (NaN)."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
