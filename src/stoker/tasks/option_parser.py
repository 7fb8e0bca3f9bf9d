"""The parser of `stoker train`: Hugging Face's HfArgumentParser, with stricter checks and errors of one sentence."""

from __future__ import annotations

from typing import Any

from transformers import HfArgumentParser

from stoker.errors import UserError, one_line
from stoker.hf.arguments import TrainingArguments
from stoker.tasks.training_options import CheckedParser, ModelOptions, check_range, joined

__all__ = ["OptionParser"]


class OptionParser(CheckedParser, HfArgumentParser):  # type: ignore[misc]
    """HfArgumentParser with one-sentence errors and range checks."""

    def __init__(self, command: str, *kinds: Any, arguments: Any = TrainingArguments) -> None:
        kinds = (ModelOptions, *kinds, arguments)
        HfArgumentParser.__init__(self, kinds, prog=f"stoker {command}", allow_abbrev=False)
        self.command = command

    def read(self, argv: list[str]) -> tuple[Any, ...]:
        """Parses a command line and checks the range of every option."""
        try:
            *options, rest = self.parse_args_into_dataclasses(
                joined(argv), return_remaining_strings=True, look_for_args_file=False
            )
        # transformers raises for bad values, and for packages that some options need
        except (ValueError, TypeError, ImportError, ArithmeticError, OSError) as error:
            raise UserError(f"stoker {self.command}: {one_line(error)}") from None
        self.refuse(rest)
        for one in options:
            check_range(one)
        return tuple(options)
