"""Rows of texts in the three forms that the losses of cross-encoders take: pairs with labels, tuples, lists of documents."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from stoker.errors import UserError
from stoker.tasks.sentences.losses import Loss
from stoker.tasks.sentences.text_rows import CLASSED, PAIRS, SCORED, TRIPLETS, TextRows
from stoker.tasks.sentences.token_table import TokenTable

__all__ = ["LOSSES", "LOSS_OF_KIND", "Documents", "as_scored", "documents_of", "label_scale", "make_datasets"]

_APART = "no_duplicates"
_LISTS = ("LambdaLoss", "ListNetLoss", "ListMLELoss", "PListMLELoss", "RankNetLoss", "ADRMSELoss")

LOSSES = {
    one.name: one
    for one in (
        Loss("BinaryCrossEntropyLoss", (SCORED, TRIPLETS), scores="share"),
        Loss("MSELoss", (SCORED, TRIPLETS), scores="share"),
        Loss("CrossEntropyLoss", (CLASSED,)),
        Loss("MultipleNegativesRankingLoss", (PAIRS, TRIPLETS), _APART),
        Loss("CachedMultipleNegativesRankingLoss", (PAIRS, TRIPLETS), _APART, cached=True),
        *(Loss(name, (SCORED, TRIPLETS)) for name in _LISTS),
    )
}
LOSS_OF_KIND = {
    SCORED: "BinaryCrossEntropyLoss",
    TRIPLETS: "BinaryCrossEntropyLoss",
    PAIRS: "MultipleNegativesRankingLoss",
    CLASSED: "CrossEntropyLoss",
}


@dataclass(frozen=True)
class Documents:
    """The documents of a query, with their scores."""

    query: str
    texts: list[str]
    scores: list[float]


def as_scored(rows: TextRows) -> TextRows:
    """Triplets as pairs with scores: 1 for the positive, 0 for each negative; repeated pairs once."""
    if rows.kind != TRIPLETS:
        return rows
    scores: dict[tuple[str, ...], float] = {}
    for query, positive, *negatives in rows.texts:
        scores[query, positive] = 1.0
        for negative in negatives:
            scores.setdefault((query, negative), 0.0)
    columns = replace(rows.columns, texts=rows.columns.texts[:2], label="label")
    return TextRows(columns, list(scores), list(scores.values()))


def documents_of(rows: TextRows) -> list[Documents]:
    """Pairs with scores by query, the best documents first, as losses that learn their order take them."""
    found: dict[str, Documents] = {}
    for (query, text), score in sorted(zip(rows.texts, rows.labels, strict=True), key=lambda one: -one[1]):
        one = found.setdefault(query, Documents(query, [], []))
        one.texts.append(text)
        one.scores.append(score)
    return [found[query] for query in dict.fromkeys(rows.column(0))]


def label_scale(loss: Loss, rows: TextRows) -> float:
    """By what scores are divided, so that they are shares of 1."""
    if loss.scores != "share" or rows.kind != SCORED:
        return 1.0
    if min(rows.labels) < 0:
        raise UserError(
            f"a pair has the score {min(rows.labels):g}; {loss.name} needs scores of 0 or more; add an offset to them, or use "
            "--loss RankNetLoss, which compares them with each other"
        )
    return float(max([1.0, *rows.labels]))


def make_datasets(
    rows: Mapping[str, TextRows],
    model: Any,
    loss: Loss,
    classes: Sequence[str] = (),
    *,
    scale: float = 1.0,
    random_negatives: int = 0,
    fresh: bool = False,
) -> tuple[dict[str, Any], TokenTable]:
    """A data set for each split, which knows the tokens of its rows (`lengths`), and the table of the tokens of all pairs.

    `random_negatives`: how many documents of other rows the loss adds to each row.
    """
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()
    forms = {split: _form(one, loss, classes, scale) for split, one in rows.items()}
    pairs = (pair for form in forms.values() for row in form for pair in _pairs(row))
    table = TokenTable.build(model, (("", pair) for pair in pairs), fresh=fresh)
    sets: dict[str, Any] = {}
    for split, form in forms.items():
        sets[split] = Dataset.from_list(form)
        counts = [len(_pairs(row)) for row in form]
        tokens = table.lengths(("", pair) for row in form for pair in _pairs(row))
        lengths = np.add.reduceat(tokens, np.concatenate([[0], np.cumsum(counts)[:-1]]))
        sets[split].lengths = lengths + int(random_negatives * tokens.mean())
    return sets, table


def _form(rows: TextRows, loss: Loss, classes: Sequence[str], scale: float) -> list[dict[str, Any]]:
    if loss.name in _LISTS:
        lists = [one for one in documents_of(as_scored(rows)) if len({*one.scores}) > 1]
        if not lists:
            raise UserError(
                f"--loss {loss.name} needs queries with several documents of different scores; use BinaryCrossEntropyLoss"
            )
        return [{"query": one.query, "documents": one.texts, "labels": one.scores} for one in lists]
    if loss.scores == "share":
        rows = as_scored(rows)
    if rows.kind == CLASSED:
        numbers = {name: n for n, name in enumerate(classes)}
        return [{"query": q, "document": d, "label": numbers[label]} for (q, d), label in _labelled(rows)]
    if rows.kind == SCORED:
        return [{"query": q, "document": d, "label": label / scale} for (q, d), label in _labelled(rows)]
    names = ("query", "positive", *(f"negative_{n}" for n in range(1, len(rows.columns.texts) - 1)))
    return [dict(zip(names, texts, strict=True)) for texts in rows.texts]


def _labelled(rows: TextRows) -> Iterator[tuple[tuple[str, ...], Any]]:
    return zip(rows.texts, rows.labels, strict=True)


def _pairs(row: dict[str, Any]) -> list[tuple[str, str]]:
    """What the model reads for a row: its query with each of its documents."""
    texts: list[str] = []
    for name, value in row.items():
        if name not in ("query", "label", "labels"):
            texts += value if isinstance(value, list) else [value]
    return [(row["query"], text) for text in texts]
