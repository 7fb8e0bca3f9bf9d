"""Predictions of a whole data set, one array per row, cut to the row's length."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["predict_rows"]


def predict_rows(
    trainer: Any, rows: Any, description: str, *, outputs: int = 1, metric_key_prefix: str = "eval"
) -> tuple[list[tuple[NDArray[Any], ...]], dict[str, float]]:
    """For each row the first `outputs` of the model, (tokens, ...) each, without padding; and the metrics of the Trainer's loop.

    `rows` is a data set with `lengths`, in tokens.
    """
    # Concatenating the predictions of all batches would copy them again for every batch.
    concatenate, trainer.args.eval_do_concat_batches = trainer.args.eval_do_concat_batches, False
    try:
        loader = trainer.get_test_dataloader(rows)
        output = trainer.evaluation_loop(
            loader, description, prediction_loss_only=False, metric_key_prefix=metric_key_prefix
        )
    finally:
        trainer.args.eval_do_concat_batches = concatenate
    left = trainer.processing_class.padding_side == "left"
    lengths: NDArray[np.int64] = rows.lengths
    found: list[tuple[NDArray[Any], ...]] = []
    for batch in output.predictions:
        for arrays in zip(*(batch[:outputs] if isinstance(batch, tuple) else (batch,)), strict=True):
            if len(found) < len(rows):  # several processes pad the last batch with repeated rows
                length = int(lengths[len(found)])
                found.append(tuple(one[len(one) - length :] if left else one[:length] for one in arrays))
    return found, output.metrics
