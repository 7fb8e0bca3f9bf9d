"""The trainer of few-shot models: embeddings first, then the classifier, which is saved with them."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stoker.requires import require
from stoker.tasks.fewshot.classifier_head import Head
from stoker.tasks.fewshot.head_fit import HeadFit
from stoker.tasks.sentences.st_trainers import EmbeddingArguments, EmbeddingTrainer

# No `from __future__ import annotations`: HfArgumentParser reads the types of these fields.

__all__ = ["FewshotArguments", "FewshotTrainer"]

require("few-shot models")


@dataclass
class FewshotArguments(EmbeddingArguments):
    """The arguments of embedding models, with SetFit's defaults."""

    num_train_epochs: float = field(default=1.0, metadata={"help": "How often each pair is trained on."})
    per_device_train_batch_size: int = field(default=16, metadata={"help": "Pairs per batch."})
    per_device_eval_batch_size: int = field(default=32, metadata={"help": "Texts that are embedded at once."})
    learning_rate: float = field(default=2e-5, metadata={"help": "The highest learning rate."})
    warmup_steps: float = field(default=0.1, metadata={"help": "Steps of warm-up, or a share of all steps below 1."})
    weight_decay: float = field(default=0.01, metadata={"help": "Weight decay."})


class FewshotTrainer(EmbeddingTrainer):
    """`fit` is called when the embeddings are trained. It is deterministic, so all ranks get the same classifier."""

    def __init__(self, *args: Any, fit: HeadFit | None = None, **named: Any) -> None:
        self._fit = fit
        self.head: Head | None = None
        super().__init__(*args, **named)

    def train(self, *args: Any, **named: Any) -> Any:
        result = super().train(*args, **named)
        if self._fit is not None:
            self.head = self._fit(self.model)
        return result

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)
        if self.head is not None:  # None in checkpoints: they are of the embeddings
            self.head.save(Path(output_dir or self.args.output_dir))
