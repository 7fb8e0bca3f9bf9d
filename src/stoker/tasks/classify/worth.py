"""What the scores of a classifier are worth: beside those of a constant answer, for each class, and what is confused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.tasks.classify.metrics import measure

__all__ = ["ConstantAnswer", "tables"]

Values = NDArray[Any]
_IN_A_SQUARE = 12  # more classes make a table that nobody reads; then the most frequent confusions are listed
_CONFUSIONS = 12
_SHORTEST = 24  # characters of a class's name in a table


@dataclass(frozen=True)
class ConstantAnswer:
    """The best answer that needs no model: the most frequent class, or the mean."""

    answer: str
    scores: dict[str, float]

    @classmethod
    def of(cls, metrics: Sequence[str], known: Values, true: Values, classes: Sequence[str]) -> ConstantAnswer | None:
        """The answer is found in the labels `known` and scored on `true`. None without labels."""
        if not len(known) or not len(true):
            return None
        if not classes:
            mean = float(known.mean())
            found = measure(metrics, np.full((len(true), 1), mean), true, regression=True)
            return cls(f"{mean:.4g}", found)
        number = int(np.bincount(known.astype(np.int64), minlength=len(classes)).argmax())
        logits = np.zeros((len(true), len(classes)))
        logits[:, number] = 1.0
        return cls(classes[number], measure(metrics, logits, true, regression=False))

    def sentence(self, metrics: Sequence[str]) -> str:
        scores = ", ".join(f"{name} {self.scores[name]:.4f}" for name in metrics)
        return f'always answering "{_short(self.answer)}" scores {scores}'


def tables(
    predicted: Values, true: Values, classes: Sequence[str], constant: ConstantAnswer | None
) -> list[dict[str, Any]]:
    """Precision, recall and F1 of each class, and the confusions, for the report."""
    counts = np.zeros((len(classes), len(classes)), np.int64)
    np.add.at(counts, (true, predicted), 1)
    right, in_data, answered = counts.diagonal(), counts.sum(1), counts.sum(0)
    rows = []
    for number, name in enumerate(classes):
        precision, recall = (int(right[number]) / max(int(total[number]), 1) for total in (answered, in_data))
        f1 = 2 * precision * recall / (precision + recall) if precision + recall else 0.0
        rows.append([_short(name), *(f"{one:.3f}" for one in (precision, recall, f1)), f"{int(in_data[number]):,}"])
    scores: dict[str, Any] = {
        "title": "Scores by class",
        "columns": ["", "precision", "recall", "F1", "in the data"],
        "rows": rows,
    }
    if constant is not None:
        figures = ", ".join(f"{name} {value:.3f}" for name, value in constant.scores.items())
        scores["note"] = f"Always answering “{_short(constant.answer)}” scores {figures}."
    return [scores, _confused(counts, [_short(name) for name in classes])]


def _confused(counts: Values, names: list[str]) -> dict[str, Any]:
    if len(names) <= _IN_A_SQUARE:
        rows = [[name, *(int(count) or "" for count in row)] for name, row in zip(names, counts, strict=True)]
        note = "Rows: the class in the data; columns: the answer."
        return {"title": "Which classes are confused", "columns": ["", *names], "rows": rows, "note": note}
    wrong = counts - np.diag(counts.diagonal())
    most = np.argsort(-wrong, axis=None, kind="stable")[:_CONFUSIONS]
    places = [divmod(int(place), len(names)) for place in most if wrong.flat[place]]
    return {
        "title": "The most frequent confusions",
        "columns": ["in the data", "answer", "rows"],
        "rows": [[names[true], names[answer], f"{int(wrong[true, answer]):,}"] for true, answer in places],
        "note": None,
    }


def _short(name: str) -> str:
    return name if len(name) <= _SHORTEST else name[: _SHORTEST - 1] + "…"
