"""transformers' label smoothing on top of Stoker's losses: the same loss, without the (tokens, vocabulary) matrix.

transformers' LabelSmoother computes the loss from the logits of a model that was called without labels. The one here asks the
model's output for it, and computes it as transformers does where the output cannot tell.
"""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from transformers import trainer_pt_utils

from stoker.model.label_smoothing import deferred_loss, labels_follow
from stoker.requires import supported

__all__ = ["LabelSmoother", "counts_items", "labels_follow_for", "smoother_for"]


class LabelSmoother(trainer_pt_utils.LabelSmoother):  # type: ignore[misc]
    def __call__(
        self, model_output: Any, labels: Any, shift_labels: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        deferred = deferred_loss(model_output)
        if deferred is not None and deferred.shifts == shift_labels:
            return deferred.compute(labels, self.ignore_index, num_items_in_batch, self.epsilon)
        items = {} if num_items_in_batch is None else {"num_items_in_batch": num_items_in_batch}
        return super().__call__(model_output, labels, shift_labels=shift_labels, **items)


def smoother_for(own: Any) -> Any:
    """What takes the place of a Trainer's label smoother: Stoker's for transformers' own, another one or None as it is."""
    if type(own) is trainer_pt_utils.LabelSmoother and supported("label smoothing"):
        return LabelSmoother(own.epsilon, own.ignore_index)
    return own


def counts_items(smoother: Any) -> bool:
    """Whether this smoother of a Trainer divides the loss by the number of items of all accumulated batches.

    Some models only average over their own batch. transformers' smoother does the former since version 5.15.
    """
    stock = trainer_pt_utils.LabelSmoother
    return isinstance(smoother, stock) and "num_items_in_batch" in inspect.signature(stock.__call__).parameters


def labels_follow_for(smoother: Any) -> AbstractContextManager[None]:
    """The context in which a Trainer with this smoother computes its loss."""
    return labels_follow() if isinstance(smoother, LabelSmoother) else nullcontext()
