"""sentence-transformers' trainers with what Stoker's Trainer adds: speed, figures, checkpoints that survive, exact resume.

Both are combined by inheritance: every method of Stoker's Trainer calls the next one, which is sentence-transformers'.
"""

import contextlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.cross_encoder import CrossEncoderTrainer, CrossEncoderTrainingArguments

from stoker.hf.arguments import TrainingArguments
from stoker.hf.trainer import Trainer
from stoker.requires import require
from stoker.tasks.combine import bases

# No `from __future__ import annotations`: HfArgumentParser reads the types of these fields.

__all__ = ["EmbeddingArguments", "EmbeddingTrainer", "RerankArguments", "RerankTrainer"]

require("sentence-transformers trainers")

_SAMPLERS = ["batch_sampler", "no_duplicates", "no_duplicates_hashed", "group_by_label"]


@dataclass
class _Defaults:
    """What differs from sentence-transformers' defaults, and what has no meaning on a command line."""

    do_train: bool = field(default=True, metadata={"help": "Train."})
    batch_sampler: str = field(
        default="batch_sampler",
        metadata={"help": "How batches are formed (default: what the loss needs).", "choices": _SAMPLERS},
    )
    # There is one data set, and prompts are options of the task.
    prompts: Any = field(default=None, init=False)
    multi_dataset_batch_sampler: Any = field(default="proportional", init=False)
    router_mapping: Any = field(default=None, init=False)
    learning_rate_mapping: Any = field(default=None, init=False)


@dataclass
class EmbeddingArguments(_Defaults, *bases(TrainingArguments, SentenceTransformerTrainingArguments)):  # type: ignore[misc]
    """sentence-transformers' arguments with Stoker's."""


@dataclass
class RerankArguments(_Defaults, *bases(TrainingArguments, CrossEncoderTrainingArguments)):  # type: ignore[misc]
    """The arguments of sentence-transformers' cross-encoders with Stoker's."""


class _Tidy:
    def add_model_card_callback(self, default_args_dict: dict[str, Any]) -> None:
        """sentence-transformers would tokenize data and ask the hub for a model card that `stoker train` replaces."""

    def evaluation_loop(self, *args: Any, **named: Any) -> Any:
        """sentence-transformers creates a folder for its CSV files, which are not written."""
        try:
            return super().evaluation_loop(*args, **named)  # type: ignore[misc]
        finally:
            with contextlib.suppress(OSError):  # it is not empty, or another rank has removed it
                (Path(self.args.output_dir) / "eval").rmdir()  # type: ignore[attr-defined]


class EmbeddingTrainer(_Tidy, *bases(Trainer, SentenceTransformerTrainer)):  # type: ignore[misc]
    """Stoker's Trainer for embedding models; takes what SentenceTransformerTrainer takes."""


class RerankTrainer(_Tidy, *bases(Trainer, CrossEncoderTrainer)):  # type: ignore[misc]
    """Stoker's Trainer for cross-encoders; takes what CrossEncoderTrainer takes."""
