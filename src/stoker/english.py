"""Articles, plurals and durations in messages that contain values."""

from __future__ import annotations

import re

__all__ = ["counted", "duration", "with_article"]

_LETTERS = "AEFHILMNORSX"  # their names begin with a vowel: an LSTM, an RMSNorm


def with_article(name: str) -> str:
    """`an Embedding`, `a BertLayer`, `an XLNetLayer`, `a UMT5Block`, `an int`."""
    if re.match(r"[A-Z]([A-Z\d]|$)", name):
        vowel = name[0] in _LETTERS
    else:
        vowel = name[:1].lower() in tuple("aeio") or re.match(r"[Uu]n(?!i)", name) is not None
    return f"{'an' if vowel else 'a'} {name}"


def counted(count: int, noun: str) -> str:
    """`1 process`, `2 processes`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}{'es' if noun.endswith('s') else 's'}"


def duration(seconds: float) -> str:
    """`12 s`, `3 min 5 s`, `2 h 7 min`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
