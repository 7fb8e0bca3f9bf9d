"""Losses whose labels a model is not given: those of transformers' label smoothing.

With a smoothing factor, transformers' Trainer calls the model without labels and computes the loss from the logits. Inside
`labels_follow` a language model in training leaves its logits uncomputed, and its output carries a `DeferredLoss`, which takes
the labels afterwards and scores the labelled tokens only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import Tensor

__all__ = ["DeferredLoss", "deferred_loss", "labels_are_expected", "labels_follow"]

_EXPECTED: ContextVar[bool] = ContextVar("stoker_labels_expected", default=False)


@dataclass(frozen=True)
class DeferredLoss:
    """What an output without a loss can compute once labels are known."""

    shifts: bool
    """Whether the label of a position is that of the next token."""
    compute: Callable[[Tensor, int, Tensor | int | None, float], Tensor]
    """The loss for labels (batch, length), ignore_index, the number of items (None: of the labels) and a smoothing factor."""


@contextmanager
def labels_follow() -> Iterator[None]:
    """Within this block, outputs of language models without labels may be given to `deferred_loss`."""
    token = _EXPECTED.set(True)
    try:
        yield
    finally:
        _EXPECTED.reset(token)


def labels_are_expected() -> bool:
    return _EXPECTED.get()


def deferred_loss(output: Any) -> DeferredLoss | None:
    """That of this output of a model; None if the model has computed its logits."""
    found = getattr(output, "__dict__", {}).get("_deferred_loss")
    return found if isinstance(found, DeferredLoss) else None
