"""Numbers that the report, the live page and the comparison of runs take from a run. Needs no other library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stoker.run_report.log import Run, number

__all__ = ["SCORES", "median", "phase_totals", "points", "smooth", "thinned", "waits_of"]

SCORES = (
    ("f1", "F1", "one"), ("exact_match", "EM", "two"), ("exact", "EM", "two"), ("accuracy", "accuracy", "three"),
    ("matthews_correlation", "Matthews", "four"), ("pearson", "Pearson", "four"), ("spearmanr", "Spearman", "five"),
    ("spearman_cosine", "Spearman", "one"), ("cosine_ndcg@10", "NDCG@10", "one"),
    ("cosine_recall@10", "recall@10", "two"), ("cosine_mrr@10", "MRR@10", "four"),
    ("cosine_accuracy", "accuracy", "three"), ("masked_accuracy", "masked tokens right", "one"),
    ("ndcg@10", "NDCG@10", "one"), ("mrr@10", "MRR@10", "two"), ("map", "MAP", "four"),
    ("average_precision", "AP", "four"), ("spearman", "Spearman", "one"), ("f1_macro", "macro F1", "one"),
    ("f1_micro", "accuracy", "three"), ("form", "form", "two"), ("right", "right", "one"),
)  # fmt: skip
"""Scores that are drawn: the metric without `eval_`, its label, and the name of its colour."""

_PHASES = ("forward", "backward", "optimizer", "data", "rest")


def points(entries: Sequence[dict[str, Any]], name: str) -> tuple[list[float], list[float]]:
    """Steps and values of a figure; entries without a finite value are left out."""
    found = [(float(one["step"]), value) for one in entries if (value := number(one, name)) is not None]
    return [step for step, _ in found], [value for _, value in found]


def smooth(values: Sequence[float], weight: float = 0.85) -> list[float]:
    """A running mean, in which older values count less."""
    means, mean, total = [], 0.0, 0.0
    for value in values:
        mean, total = weight * mean + value, weight * total + 1.0
        means.append(mean / total)
    return means


def median(run: Run, name: str) -> float | None:
    """The median of a figure over the steps; None if no step has it."""
    values = sorted(value for one in run.steps if (value := number(one, name)) is not None)
    return values[len(values) // 2] if values else None


def phase_totals(run: Run) -> dict[str, float]:
    """Seconds of all logged steps by phase."""
    totals = dict.fromkeys(_PHASES, 0.0)
    for one in run.steps:
        for name in totals:
            totals[name] += max(number(one.get("phases") or {}, name) or 0.0, 0.0)
    return totals


def waits_of(run: Run) -> tuple[list[list[float]], list[int]]:
    """Seconds that each rank waited, by step, and how often each rank was the last to arrive.

    Steps in which nobody waited are skipped: between two averages of local SGD, ranks do not synchronize.
    """
    rows = [row for entry in run.waits for row in entry.get("rows") or () if len(row) > 3 and any(row[2:])]
    ranks = max((len(row) - 2 for row in rows), default=0)
    rows = [row for row in rows if len(row) - 2 == ranks]  # if the number of ranks changed, use the larger job
    return rows, [sum(row[1] == rank for row in rows) for rank in range(ranks)]


def thinned(steps: Sequence[float], values: Sequence[float], most: int) -> tuple[list[float], list[float]]:
    """At most `most` points: means of neighbours, at the last step of each group."""
    size = -(-len(steps) // most) if steps else 1
    groups = [slice(at, at + size) for at in range(0, len(steps), size)]
    return [steps[group][-1] for group in groups], [sum(values[group]) / len(values[group]) for group in groups]
