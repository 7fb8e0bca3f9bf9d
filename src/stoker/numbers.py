"""Parses numbers from options, config files, hostfiles and environment variables. All of Stoker uses these two functions.

`float` accepts `inf` and `nan`; `int` accepts numbers beyond 64 bits and raises for more than 4,300 digits. No setting allows
any of these.
"""

from __future__ import annotations

import math
import re

__all__ = ["finite_number", "whole_number"]

_WHOLE = re.compile(r"[+-]?[0-9](?:_?[0-9]){0,17}")
"""Fits into 64 bits, as torch, numpy and the operating system need."""


def whole_number(text: str) -> int | None:
    """Parses a whole number; None if the text is not one, or needs more than 64 bits."""
    text = text.strip()
    return int(text) if _WHOLE.fullmatch(text) else None


def finite_number(text: str) -> float | None:
    """Parses a number; None if the text is not one, or stands for infinity or NaN."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
