"""Checks that apply to every option of every command: text must be UTF-8, numbers must be finite.

`StrictValues` is a base class of both argument parsers (`cli.parsing.Parser` and the one derived from HfArgumentParser), so no
option can be declared without these checks.
"""

from __future__ import annotations

import argparse
from typing import Any

from stoker.numbers import finite_number, whole_number
from stoker.requires import require, supported

__all__ = ["StrictValues", "is_text"]

supported("option values")  # else `_get_value` below would never be called


def is_text(word: str) -> bool:
    """Whether an argument can be a name or a value: UTF-8, and without NUL, which file names cannot contain."""
    try:
        word.encode()
    except UnicodeEncodeError:  # bytes of a command line that are not UTF-8 arrive as lone surrogates
        return False
    return "\0" not in word


class StrictValues(argparse.ArgumentParser):
    """Rejects inf, NaN, whole numbers beyond 64 bits, and text that is not UTF-8, for every option."""

    @property
    def option_names(self) -> list[str]:
        require("option names")
        return list(self._option_string_actions)

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        if not is_text(arg_string):
            raise argparse.ArgumentError(action, f"{arg_string!r} is not UTF-8 text; choose another name")
        if action.type is int:
            value: Any = whole_number(arg_string)
        elif action.type is float:
            value = finite_number(arg_string)
        else:
            value = super()._get_value(action, arg_string)  # type: ignore[misc]
            if not isinstance(value, float | int):
                return value
            value = value if isinstance(value, bool) or finite_number(str(value)) is not None else None
        if value is None:
            kind = "whole number of at most 18 digits" if action.type is int else "finite number"
            raise argparse.ArgumentError(action, f"{arg_string!r} is not a {kind}")
        return value
