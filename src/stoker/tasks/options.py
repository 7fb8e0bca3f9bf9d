"""The flags of `stoker train`: those of Hugging Face's example scripts, parsed by its own parser, with this house's manners."""

import difflib
import json
import os
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from transformers import HfArgumentParser

from stoker.errors import UserError
from stoker.hf.arguments import TrainingArguments

# No postponed annotations here: HfArgumentParser reads the types of these fields.

__all__ = ["DataOptions", "ModelOptions", "OptionParser", "given", "program", "words_of"]


@dataclass
class ModelOptions:
    """Which model to fine-tune."""

    model_name_or_path: str = field(metadata={"help": "A folder, or the name of a model on the hub."})
    config_name: str | None = field(default=None, metadata={"help": "Configuration, if not the model's own."})
    tokenizer_name: str | None = field(default=None, metadata={"help": "Tokenizer, if not the model's own."})
    cache_dir: str | None = field(default=None, metadata={"help": "Where downloaded models are kept."})
    model_revision: str = field(default="main", metadata={"help": "Branch, tag or commit on the hub."})
    token: str | None = field(default=None, metadata={"help": "Access token for the hub."})
    ignore_mismatched_sizes: bool = field(
        default=False, metadata={"help": "Replace a head of another size instead of refusing it."}
    )


@dataclass
class DataOptions:
    """Which data to use, common to all tasks."""

    dataset_name: str | None = field(default=None, metadata={"help": "A data set on the hub."})
    dataset_config_name: str | None = field(default=None, metadata={"help": "Its configuration."})
    train_file: str | None = field(
        default=None, metadata={"help": "Training data: JSON, JSON lines, CSV, TSV, Parquet."}
    )
    validation_file: str | None = field(default=None, metadata={"help": "Data to evaluate on."})
    test_file: str | None = field(default=None, metadata={"help": "Data to predict."})
    overwrite_cache: bool = field(default=False, metadata={"help": "Tokenize again instead of using the cache."})
    preprocessing_num_workers: int | None = field(default=None, metadata={"help": "Threads that tokenize."})
    max_train_samples: int | None = field(default=None, metadata={"help": "Use only the first so many examples."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Evaluate only on the first so many."})
    max_predict_samples: int | None = field(default=None, metadata={"help": "Predict only the first so many."})
    strict: bool = field(default=False, metadata={"help": "Stop at the first row that cannot be used."})
    skip_memory_check: bool = field(default=False, metadata={"help": "Train even if the memory seems too small."})


class OptionParser(HfArgumentParser):  # type: ignore[misc]
    """Answers a mistake with one sentence."""

    def __init__(self, command: str, *kinds: Any) -> None:
        super().__init__([ModelOptions, *kinds, TrainingArguments], prog=f"stoker {command}", allow_abbrev=False)
        self.command = command

    def error(self, message: str) -> NoReturn:
        raise UserError(f"stoker {self.command}: {message}; `stoker {self.command} --help` lists the common options")

    def read(self, argv: list[str]) -> tuple[Any, ...]:
        """The options of a command line, each in the range where it means something."""
        try:
            *options, rest = self.parse_args_into_dataclasses(
                argv, return_remaining_strings=True, look_for_args_file=False
            )
        # transformers checks values by raising, and asks for packages that some options need
        except (ValueError, TypeError, ImportError) as error:
            raise UserError(f"stoker {self.command}: {' '.join(str(error).split())}") from None
        if rest:
            known = [name for action in self._actions for name in action.option_strings]
            close = difflib.get_close_matches(rest[0].partition("=")[0], known, n=1, cutoff=0.7)
            hint = f" (did you mean {close[0]}?)" if close else ""
            self.error(f"unknown option {rest[0]}{hint}")
        for one in options:
            _check_range(one)
        return tuple(options)


_LEAST = {
    "doc_stride": 0,
    "n_best_size": 1,
    "max_answer_length": 1,
    "max_train_samples": 1,
    "max_eval_samples": 1,
    "max_predict_samples": 1,
    "preprocessing_num_workers": 1,
    "tokens_per_batch": 1,
    "per_device_train_batch_size": 1,
    "per_device_eval_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "learning_rate": 0,
    "num_train_epochs": 0,
    "seed": 0,
}
"""Below these, options fail late and in words of the libraries below, or quietly do something else."""


def _check_range(options: Any) -> None:
    for name, least in _LEAST.items():
        value = getattr(options, name, None)
        if value is not None and not value >= least:
            raise UserError(f"--{name} is {value}; it must be {least} or more")
    if getattr(options, "seed", 0) >= 1 << 32:
        raise UserError(f"--seed is {options.seed}; it must be below {1 << 32}")


def words_of(argv: list[str]) -> list[str]:
    """The words of a command line; where it is one JSON file of options, those that mean the same."""
    if len(argv) != 1 or not argv[0].endswith(".json"):
        return argv
    try:
        content = json.loads(Path(argv[0]).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"the file of options {argv[0]} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"the file of options {argv[0]} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"the file of options {argv[0]} holds no object of names and values")
    words: list[str] = []
    for name, value in content.items():
        if isinstance(value, list):
            words += [f"--{name}", *map(str, value)]
        elif value is not None:
            words.append(f"--{name}={json.dumps(value) if isinstance(value, dict) else value}")
    return words


def program() -> list[str]:
    """The words that call this program as it was called, so that a printed command works when pasted."""
    called = Path(sys.argv[0])
    if called.name == "__main__.py":
        return [sys.executable, "-m", "stoker"]
    found = shutil.which("stoker")
    if called.name == "stoker" and called.exists() and not (found and os.path.samefile(found, called)):
        return [str(called)]
    return ["stoker"]


def given(name: str, argv: list[str]) -> bool:
    """Whether an option was given on the command line, rather than left at its default."""
    spellings = (f"--{name}", f"--{name.replace('_', '-')}")
    return any(word.partition("=")[0] in spellings for word in argv)
