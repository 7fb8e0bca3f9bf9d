"""The argument parser of every `stoker` command: a mistake is answered by one sentence, with the option probably meant."""

from __future__ import annotations

import argparse
import difflib
import importlib
import re
from collections.abc import Iterable
from typing import NoReturn

from stoker.errors import UserError, one_line
from stoker.option_values import MOST, StrictValues, amount, count, many, number, path, port, seconds, whole

__all__ = [
    "MOST", "Parser", "amount", "count", "did_you_mean", "many", "number", "path", "port", "require_packages",
    "require_sft", "require_transformers", "seconds", "whole",
]  # fmt: skip


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


def require_transformers(command: str, *, extra: str) -> None:
    """Raises UserError if transformers is missing or cannot be imported."""
    require_packages(command, ["transformers"], "transformers and accelerate", extra=extra)


def require_sft(command: str) -> None:
    """Raises UserError if something is missing that fine-tuning a language model needs."""
    require_packages(command, ["transformers", "datasets", "peft", "trl"], "TRL, PEFT and datasets", extra="sft")


def require_packages(command: str, packages: Iterable[str], needs: str, *, extra: str) -> None:
    """Raises UserError if one of the packages is missing or cannot be imported; the message says that `command` needs `needs`."""
    for package in packages:
        try:
            importlib.import_module(package)
        except ImportError as error:
            if isinstance(error, ModuleNotFoundError) and error.name == package:
                message = f"{command} needs {needs}: pip install 'stoker[{extra}]'"
            else:
                message = (
                    f"{package} is installed but cannot be imported: {one_line(error)}; install it again, or rename "
                    "a file of your own in this directory that has the name of a package"
                )
            raise UserError(message) from None
