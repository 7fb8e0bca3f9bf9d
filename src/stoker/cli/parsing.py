"""The argument parser of every `stoker` command: a mistake is answered by one sentence, with the option probably meant."""

from __future__ import annotations

import argparse
import difflib
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Iterable
from typing import NoReturn

from stoker.errors import UserError, one_line, readable
from stoker.option_values import MOST, StrictValues, amount, count, many, number, path, port, seconds, whole

__all__ = [
    "MOST", "TRANSFORMERS", "Parser", "amount", "announce", "count", "did_you_mean", "many", "number", "path", "port",
    "require_installed", "require_packages", "require_sft", "require_transformers", "seconds", "whole",
]  # fmt: skip

TRANSFORMERS = "transformers and accelerate"
"""What messages call what every task needs."""


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


def announce(line: str, *, terminals_only: bool = False) -> None:
    """Prints to standard error, on the first rank, what takes the next seconds."""
    if os.environ.get("RANK", "0") == "0" and (sys.stderr.isatty() or not terminals_only):
        print(readable(line), file=sys.stderr, flush=True)


def require_transformers(command: str, *, extra: str) -> None:
    """Raises UserError if transformers is missing or cannot be imported."""
    require_packages(command, ["transformers"], TRANSFORMERS, extra=extra)


def require_sft(command: str) -> None:
    """Raises UserError if something is missing that fine-tuning a language model needs."""
    require_packages(command, ["transformers", "datasets", "peft", "trl"], "TRL, PEFT and datasets", extra="sft")


def require_packages(command: str, packages: Iterable[str], needs: str, *, extra: str) -> None:
    """Raises UserError if one of the packages is missing or cannot be imported; the message says that `command` needs `needs`."""
    packages = list(packages)
    require_installed(command, packages, needs, extra=extra)
    for package in packages:
        try:
            importlib.import_module(package)
        except ImportError as error:
            if isinstance(error, ModuleNotFoundError) and error.name == package:
                message = _missing(command, needs, extra)
            else:
                message = (
                    f"{package} is installed but cannot be imported: {one_line(error)}; install it again, or rename "
                    "a file of your own in this directory that has the name of a package"
                )
            raise UserError(message) from None


def require_installed(command: str, packages: Iterable[str], needs: str, *, extra: str) -> None:
    """Raises UserError if one of the packages is missing, without importing any."""
    if not all(map(_is_installed, packages)):
        raise UserError(_missing(command, needs, extra))


def _is_installed(package: str) -> bool:
    try:
        return sys.modules.get(package) is not None or importlib.util.find_spec(package) is not None
    except (ImportError, ValueError) as error:  # it is there, but broken; whoever imports it says how
        return getattr(error, "name", None) != package


def _missing(command: str, needs: str, extra: str) -> str:
    return f"{command} needs {needs}: pip install 'stoker[{extra}]'"
