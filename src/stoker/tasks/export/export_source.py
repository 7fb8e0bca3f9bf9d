"""What is exported: the folder, its kind of model, and the options of its run that evaluation needs."""

from __future__ import annotations

import dataclasses
import importlib
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.errors import UserError
from stoker.tasks import recipe
from stoker.tasks.fewshot.classifier_head import has_head
from stoker.tasks.use.model_kind import model_kind

__all__ = ["Source", "find_source"]

log = logging.getLogger("stoker")

_TASKS = {
    "answer": "qa", "classify": "classify", "tag": "ner", "fill": "mlm", "embed": "embed", "rerank": "rerank", "chat": "sft",
}  # fmt: skip
_NOT_FOR_EVALUATION = (
    "train_file",
    "test_file",
    "max_train_samples",
    "max_predict_samples",
    "mine_negatives",
    "corpus_file",
    "live",
    "live_port",
    "live_host",
)


@dataclass(frozen=True)
class Source:
    name: str
    kind: str
    """One of `use.model_kind.KINDS`."""
    evaluation: list[str] | None
    """Options with which `stoker train` evaluates; None without validation data."""
    task: str
    """Of `stoker train`."""

    @property
    def folder(self) -> Path:
        return Path(self.name)

    @property
    def of_sentences(self) -> bool:
        """Whether sentence-transformers loads it."""
        return self.task in ("embed", "rerank", "fewshot")


def find_source(name: str, validation_file: str | None) -> Source:
    folder = Path(name)
    kind = model_kind(
        name, "only encoders with a head, embedding models, rerankers and language models can be exported"
    )
    task = "fewshot" if kind == "classify" and has_head(folder) else _TASKS[kind]
    return Source(name, kind, _evaluation(folder, task, validation_file), task)


def _evaluation(folder: Path, task: str, validation_file: str | None) -> list[str] | None:
    """The options of the run's recipe that are about data; `validation_file` takes precedence over its own."""
    options: dict[str, Any] = {}
    if (folder / recipe.FILE).is_file():
        options = recipe.read(str(folder / recipe.FILE))
        if options.get("task") != task:
            options = {}
    own = options.get("validation_file")
    if validation_file is not None:
        if not os.path.isfile(validation_file):
            raise UserError(f"--validation_file {validation_file} does not exist")
        if task == "sft":
            raise UserError(
                "--validation_file is for encoders: of language models, the next tokens they predict are compared"
            )
        options |= {"validation_file": validation_file, "dataset_name": None}
    elif own is not None and not all(map(os.path.isfile, own if isinstance(own, list) else [own])):
        log.warning("the validation file of the run, %s, is not here; name it with --validation_file", own)
        return None
    if task == "sft" or not (options.get("validation_file") or options.get("dataset_name") or options.get("task_name")):
        return None
    module = importlib.import_module(f"stoker.tasks.{task}.fine_tune")
    kind = getattr(module, f"{task.capitalize()}Options")
    known = {one.name for one in dataclasses.fields(kind)} - {*_NOT_FOR_EVALUATION}
    return recipe.arguments({name: value for name, value in options.items() if name in known})
