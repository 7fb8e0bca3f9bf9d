"""Values of options: checks that apply to every option of every command, and the types that options share.

`StrictValues` is a base class of both argument parsers (`cli.parsing.Parser` and the one derived from HfArgumentParser), so no
option can be declared without these checks. The other functions convert the text of one option; they raise
argparse.ArgumentTypeError.
"""

from __future__ import annotations

import argparse
from typing import Any

from stoker.numbers import finite_number, whole_number
from stoker.requires import drop_unsupported, require

__all__ = ["MOST", "StrictValues", "amount", "count", "is_text", "many", "number", "path", "port", "seconds", "whole"]

MOST = 65536
"""Of processes, machines, cores and threads: more must be a typing error."""
_LARGEST = 1e15
"""Of prices, parameters and microseconds: products of several of them stay finite."""
_YEAR = 366 * 24 * 3600


def is_text(word: str) -> bool:
    """Whether an argument can be a name or a value: UTF-8, and without NUL, which file names cannot contain."""
    try:
        word.encode()
    except UnicodeEncodeError:  # bytes of a command line that are not UTF-8 arrive as lone surrogates
        return False
    return "\0" not in word


@drop_unsupported
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


def whole(text: str, *, least: int = 0, most: int = MOST) -> int:
    value = whole_number(text)
    if value is None or value < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number{' above 0' if least else ' of 0 or more'}")
    if value > most:
        raise argparse.ArgumentTypeError(f"{text!r} is too large; the most is {most:,}")
    return value


def count(text: str) -> int:
    """The number of processes, machines, cores, threads or rows of a batch: at least one."""
    return whole(text, least=1)


def many(text: str) -> int:
    """A count that may be in the millions."""
    return whole(text, least=1, most=10**12)


def port(text: str) -> int:
    value = whole_number(text)
    if value is None or not 0 <= value <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port, 0 to 65535")
    return value


def number(text: str) -> float:
    value = finite_number(text)
    if value is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number")
    return value


def amount(text: str) -> float:
    value = finite_number(text)
    if value is None or value < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 0 or more")
    if value > _LARGEST:
        raise argparse.ArgumentTypeError(f"{text!r} is too large; the most is {_LARGEST:g}")
    return value


def seconds(text: str) -> float:
    value = finite_number(text)
    if value is None or not 0 < value <= _YEAR:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0, at most a year")
    return value


def path(text: str) -> str:
    """The name of a file or folder. An empty one is probably an unset shell variable."""
    if not text:
        raise argparse.ArgumentTypeError("the name is empty; is a shell variable not set?")
    return text
