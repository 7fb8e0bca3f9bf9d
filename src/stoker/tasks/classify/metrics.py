"""GLUE's metrics: accuracy, F1, Matthews, Pearson and Spearman correlation, from their definitions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["METRICS", "is_combined", "measure", "ranks"]

Values = NDArray[Any]


def accuracy(predicted: Values, true: Values) -> float:
    return float((predicted == true).mean()) if len(true) else 0.0


def f1(predicted: Values, true: Values, classes: int = 2) -> float:
    """F1 of class 1 for two classes, as in GLUE; else the mean over the classes that occur."""
    wanted = [1] if classes <= 2 else np.union1d(predicted, true).tolist()
    return float(np.mean([_f1_of(predicted == one, true == one) for one in wanted]))


def _f1_of(predicted: Values, true: Values) -> float:
    both = int((predicted & true).sum())
    total = int(predicted.sum()) + int(true.sum())
    return 2.0 * both / total if total else 0.0


def matthews_correlation(predicted: Values, true: Values) -> float:
    classes = np.union1d(predicted, true)
    table = np.array([[((true == t) & (predicted == p)).sum() for p in classes] for t in classes], float)
    rows, columns, total, right = table.sum(1), table.sum(0), table.sum(), np.trace(table)
    spread = np.sqrt((total**2 - (rows**2).sum()) * (total**2 - (columns**2).sum()))
    return float((right * total - rows @ columns) / spread) if spread else 0.0


def pearson(predicted: Values, true: Values) -> float:
    a, b = predicted - predicted.mean(), true - true.mean()
    spread = float(np.sqrt((a**2).sum() * (b**2).sum()))
    return float((a * b).sum()) / spread if spread else 0.0


def spearmanr(predicted: Values, true: Values) -> float:
    return pearson(ranks(predicted), ranks(true))


def ranks(values: Values) -> Values:
    """Ranks from 1; equal values share their mean rank."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    means: Values = ends - (counts - 1) / 2.0
    return means[inverse]


def mse(predicted: Values, true: Values) -> float:
    return float(((predicted - true) ** 2).mean()) if len(true) else 0.0


METRICS: dict[str, Callable[[Values, Values], float]] = {
    "accuracy": accuracy,
    "f1": f1,
    "matthews_correlation": matthews_correlation,
    "pearson": pearson,
    "spearmanr": spearmanr,
    "mse": mse,
}


def is_combined(names: Sequence[str]) -> bool:
    """Whether these metrics have a meaningful mean: an error (mse) cannot be averaged with a score."""
    return len(names) > 1 and "mse" not in names


def measure(names: Sequence[str], logits: Values, true: Values, *, regression: bool) -> dict[str, float]:
    predicted = logits.reshape(len(true), -1)[:, 0] if regression else logits.argmax(-1)
    # The model knows the number of classes; a small part of the data may lack some.
    known = METRICS if regression else METRICS | {"f1": partial(f1, classes=logits.shape[-1])}
    found = {name: known[name](predicted, true) for name in names}
    if is_combined(names):
        found["combined_score"] = float(np.mean(list(found.values())))
    return found
