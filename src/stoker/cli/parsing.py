"""argparse with one-sentence errors that suggest the option that was probably meant.

It also defines the types of options, so that a number or a path means the same in every command.
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterable
from typing import NoReturn

from stoker.errors import UserError, one_line
from stoker.numbers import finite_number, whole_number
from stoker.option_values import StrictValues

__all__ = [
    "MOST", "Parser", "amount", "count", "did_you_mean", "many", "number", "path", "port", "require_transformers", "seconds",
    "whole",
]  # fmt: skip

MOST = 65536
"""Of processes, machines, cores and threads: more must be a typing error."""
_LARGEST = 1e15
"""Of prices, parameters and microseconds: products of several of them stay finite."""
_YEAR = 366 * 24 * 3600


class Parser(StrictValues):
    """A parser that raises UserError. Abbreviated options are off: they would break when options are added."""

    def __init__(self, command: str, summary: str, *, examples: str | None = None) -> None:
        super().__init__(
            prog=f"stoker {command}",
            description=summary[:1].upper() + summary[1:] + ".",
            epilog=examples,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        help_line = f"`{self.prog} --help` lists its options"
        if match := re.match(r"unrecognized arguments: (.*)", message, re.S):
            word = match[1].split()[0] if match[1].split() else match[1]
            kind = "option" if word.startswith("-") else "argument"
            raise UserError(f"{self.prog}: unknown {kind} {word}{did_you_mean(word, self.option_names)}; {help_line}")
        raise UserError(f"{self.prog}: {message}; {help_line}")


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """ ", did you mean ...?" if one of the choices is close; else nothing."""
    close = difflib.get_close_matches(word.partition("=")[0], list(choices), n=1, cutoff=0.6)
    return f" (did you mean {close[0]}?)" if close else ""


def whole(text: str, *, least: int = 0, most: int = MOST) -> int:
    value = whole_number(text)
    if value is None or value < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number{' above 0' if least else ''}")
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


def require_transformers(command: str, *, extra: str) -> None:
    """Raises UserError if transformers is missing or cannot be imported."""
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "transformers":
            message = f"{command} needs transformers and accelerate: pip install 'stoker[{extra}]'"
        else:
            message = (
                f"transformers is installed but cannot be imported: {one_line(error)}; install it again, or rename "
                "a file of your own in this directory that has the name of a package"
            )
        raise UserError(message) from None
