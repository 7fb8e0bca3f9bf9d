"""argparse with the manners of this house: a mistake is answered by one sentence, with the word probably meant."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterable
from typing import NoReturn

from stoker.errors import UserError

__all__ = ["Parser", "did_you_mean"]


class Parser(argparse.ArgumentParser):
    """A parser whose errors are UserErrors. Options are written out: abbreviations break when options are added."""

    def __init__(self, command: str, summary: str, *, examples: str | None = None) -> None:
        super().__init__(
            prog=f"stoker {command}",
            description=summary[:1].upper() + summary[1:] + ".",
            epilog=examples,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        help_line = f"`{self.prog} --help` lists what it takes"
        if match := re.match(r"unrecognized arguments: (.*)", message, re.S):
            word = match[1].split()[0] if match[1].split() else match[1]
            options = [option for action in self._actions for option in action.option_strings]
            kind = "option" if word.startswith("-") else "argument"
            raise UserError(f"{self.prog}: unknown {kind} {word}{did_you_mean(word, options)}; {help_line}")
        raise UserError(f"{self.prog}: {message}; {help_line}")


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """ ", did you mean ...?" if one of the choices is close; else nothing."""
    close = difflib.get_close_matches(word.partition("=")[0], list(choices), n=1, cutoff=0.6)
    return f" (did you mean {close[0]}?)" if close else ""
