"""Tokens and passwords on a command line: what is kept of a command, and may be published, does not hold them."""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["HIDDEN", "without_secrets"]

HIDDEN = "hidden"
_SECRET = re.compile(r"--(\w+_)?(token|password|secret|api_key)")


def without_secrets(words: Sequence[str], instead: str | None = HIDDEN) -> list[str]:
    """`words` with `instead` for the value of each secret option; None leaves such an option out."""
    kept: list[str] = []
    value_follows = False
    for word in words:
        option, equals, _ = word.partition("=")
        if _SECRET.fullmatch(option.replace("-", "_").replace("__", "--", 1)):
            value_follows = not equals
            kept += [] if instead is None else [f"{option}={instead}" if equals else option]
        elif value_follows and not word.startswith("--"):
            value_follows = False
            kept += [] if instead is None else [instead]
        else:
            value_follows = False
            kept.append(word)
    return kept
