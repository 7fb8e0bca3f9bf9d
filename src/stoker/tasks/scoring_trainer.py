"""A Trainer whose evaluation scores the whole data set at once, where transformers' compute_metrics sees padded batches only."""

from __future__ import annotations

import time
from typing import Any

from stoker.hf.trainer import Trainer

__all__ = ["ScoringTrainer"]


class ScoringTrainer(Trainer):
    """A task defines `score`; evaluation logs what it returns, as transformers' own would."""

    def score(self, rows: Any, prefix: str) -> tuple[dict[str, float], int]:
        """The metrics of a data set, without the prefix, and how many examples it has."""
        raise NotImplementedError

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        begin = time.perf_counter()
        found, examples = self.score(self.eval_dataset if eval_dataset is None else eval_dataset, metric_key_prefix)
        seconds = time.perf_counter() - begin
        metrics: dict[str, float] = {f"{metric_key_prefix}_{name}": value for name, value in found.items()}
        metrics[f"{metric_key_prefix}_runtime"] = round(seconds, 3)
        metrics[f"{metric_key_prefix}_samples_per_second"] = round(examples / seconds, 2)
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics
