"""The tasks of `stoker train` and `stoker tune`, how a command line names one, and what it needs to be installed."""

from __future__ import annotations

from collections.abc import Sequence

from stoker.cli.parsing import (
    TRANSFORMERS,
    announce,
    did_you_mean,
    require_installed,
    require_packages,
    require_transformers,
)
from stoker.command_options import options_of
from stoker.errors import UserError
from stoker.tasks import recipe

__all__ = ["TASKS", "announce_loading", "require_task", "require_task_installed", "task_and_options"]

TASKS = {
    "qa": "answer questions from texts (SQuAD)",
    "classify": "classify texts or pairs of texts, or predict a number (GLUE)",
    "fewshot": "classify texts, from a few examples of each class (SetFit)",
    "ner": "find named entities in texts",
    "mlm": "continue the pre-training of a model on texts, by masked words",
    "sft": "fine-tune a language model on chats, instructions, texts or preference pairs",
    "embed": "train an embedding model on pairs, triplets, pairs with scores, or labelled texts",
    "rerank": "train a cross-encoder that scores or classifies pairs of texts",
}
_SENTENCES = (["datasets", "sentence_transformers"], "sentence-transformers and datasets", "embed")
_NEEDS = {
    "sft": (["datasets", "peft", "trl"], "TRL, PEFT and datasets", "sft"),
    "ner": (["seqeval"], "transformers and seqeval", "ner"),
    "fewshot": (
        ["datasets", "sentence_transformers", "setfit"],
        "SetFit, sentence-transformers and datasets",
        "fewshot",
    ),
    "embed": _SENTENCES,
    "rerank": _SENTENCES,
}
"""Packages that a task needs besides transformers, what the message calls them, and the extra that installs them."""
_STOCK = ("--no_ipex", "--no_ipex=True")
"""As typed, and as a recipe gives it."""


def task_and_options(command: str, argv: Sequence[str]) -> tuple[str, list[str]]:
    """The task that `argv` names first, or its recipe; and the options, those of a recipe among them."""
    task, *rest = recipe.expand(argv, TASKS, command)
    if task not in TASKS:
        raise UserError(
            f"stoker {command}: unknown task {task!r}{did_you_mean(task, TASKS)}; choose {', '.join(TASKS)}"
        )
    return task, [_spelled_out(word) for word in rest]


def _spelled_out(argument: str) -> str:
    """--no_ipex and --model by their long names, which records and recipes of a run have."""
    if argument in _STOCK:
        return "--use_ipex=False"
    name, equals, value = argument.partition("=")
    return f"--model_name_or_path{equals}{value}" if name == "--model" else argument


def require_task(command: str, task: str) -> None:
    """Raises UserError if a package that the task needs is missing or cannot be imported. Imports them."""
    if task in _NEEDS:
        packages, needs, extra = _NEEDS[task]
        require_packages(f"stoker {command} {task}", ["transformers", *packages], needs, extra=extra)
    require_transformers(f"stoker {command}", extra="hf")


def require_task_installed(command: str, task: str) -> None:
    """Raises UserError if a package that the task needs is missing, without importing any."""
    if task in _NEEDS:
        packages, needs, extra = _NEEDS[task]
        require_installed(f"stoker {command} {task}", ["transformers", *packages], needs, extra=extra)
    require_installed(f"stoker {command}", ["transformers"], TRANSFORMERS, extra="hf")


def announce_loading(options: Sequence[str]) -> None:
    """The first line of a run: what follows, the import of torch and transformers and the model itself, takes many seconds."""
    announce(f"loading {options_of(options).get('model_name_or_path', 'the model')} ...")
