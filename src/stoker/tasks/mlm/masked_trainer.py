"""The Trainer of masked language models: evaluates by perplexity and accuracy on masks that are the same every time."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from stoker.hf.seeded_batches import BatchSeeds, seed_batches
from stoker.model.families import Family, find
from stoker.requires import require
from stoker.tasks.mlm.features import TextRows
from stoker.tasks.scoring_trainer import ScoringTrainer

__all__ = ["MlmTrainer", "masked_logits"]

IGNORED = -100

require("masked-LM task")


class MlmTrainer(ScoringTrainer):
    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        loader = super().get_eval_dataloader(eval_dataset)
        seed_batches(loader, BatchSeeds(self.args.seed, self.args.process_index))
        return loader

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """For each row the sum of the losses of its masked tokens, how many of them are right, and how many there are."""
        inputs = self._prepare_inputs(inputs)
        labels = inputs.pop("labels")
        with torch.no_grad(), self.compute_loss_context_manager():
            logits = masked_logits(model, self.model, inputs, labels != IGNORED).float()
        row = (labels != IGNORED).nonzero()[:, 0]
        true = labels[labels != IGNORED]
        losses = nn.functional.cross_entropy(logits, true, reduction="none")
        figures = torch.stack([losses, (logits.argmax(-1) == true).float(), torch.ones_like(losses)], 1)
        sums = torch.zeros(len(labels), 3).index_add_(0, row, figures)
        return sums[:, 0].sum() / max(len(true), 1), sums, None

    def score(self, rows: TextRows, prefix: str) -> tuple[dict[str, float], int]:
        concatenate, self.args.eval_do_concat_batches = self.args.eval_do_concat_batches, True
        try:
            loader = self.get_eval_dataloader(rows)
            output = self.evaluation_loop(loader, "Evaluation", prediction_loss_only=False, metric_key_prefix=prefix)
        finally:
            self.args.eval_do_concat_batches = concatenate
        losses, right, masked = output.predictions[: len(rows)].sum(0, dtype="float64").tolist()
        loss = losses / max(masked, 1.0)
        accuracy = right / max(masked, 1.0)
        return {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "masked_accuracy": accuracy}, len(rows)


def masked_logits(model: nn.Module, unwrapped: nn.Module, inputs: dict[str, Any], masked: Tensor) -> Tensor:
    """Logits (masked tokens, vocabulary). Those of all tokens would take more memory than the rest of the model.

    `model` is `unwrapped`, or a wrapper of it for several processes.
    """
    row = find(type(unwrapped))
    first = None if row is None else _first_of_head(unwrapped, row[0])
    if first is None:
        every: Tensor = model(**inputs).logits
        return every[masked]
    with _only(first, masked):
        logits: Tensor = model(**inputs).logits
    return logits.flatten(0, 1)


def _first_of_head(model: nn.Module, row: Family) -> nn.Module | None:
    """The first layer of the head; None if the table does not know this model's."""
    modules = dict(model.named_modules())
    heads = (head for head in (row.masked_lm, row.other_masked_lm) if head is not None)
    paths = (head.dense or head.norm or head.decoder for head in heads)
    return next((modules[path] for path in paths if path in modules), None)


@contextlib.contextmanager
def _only(first_of_head: nn.Module, masked: Tensor) -> Iterator[None]:
    """The head, whose first layer this is, sees the hidden states of these tokens only; it treats each token by itself."""

    def select(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (args[0][masked].unsqueeze(0), *args[1:])

    hook = first_of_head.register_forward_pre_hook(select)
    try:
        yield
    finally:
        hook.remove()
