"""Examples for the report: what is nearest to a text before and after training, and the pairs whose similarity is most wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.tasks.sentences.report_examples import Examples, FirstTexts, PairScores
from stoker.tasks.sentences.text_rows import LABELLED, PAIRS, SCORED, TextRows
from stoker.tasks.shown_rows import spread

__all__ = ["choose_examples"]

_ANCHORS, _CANDIDATES, _PAIRS = 60, 300, 200
"""How many texts are embedded for the examples: enough to find interesting ones, in a few seconds."""


def choose_examples(rows: TextRows) -> Examples | None:
    """Examples for this kind of data; None if there are none to choose from."""
    if rows.kind == SCORED:
        chosen = spread(len(rows), _PAIRS)
        expected = np.array([rows.labels[n] for n in chosen])
        return PairScores("Similarity of pairs", [rows.texts[n] for n in chosen], expected, "similarity", _similarities)
    chosen = spread(len(rows), _ANCHORS)
    if rows.kind == LABELLED:
        return _of_classes(rows, chosen)
    anchors = [rows.texts[n][0] for n in chosen]
    if rows.kind == PAIRS:
        candidates = list(dict.fromkeys(rows.texts[n][1] for n in [*chosen, *spread(len(rows), _CANDIDATES)]))
        allowed = [list(range(len(candidates)))] * len(anchors)
    else:
        candidates = list(dict.fromkeys(text for n in chosen for text in rows.texts[n][1:]))
        place = {text: i for i, text in enumerate(candidates)}
        allowed = [[place[text] for text in rows.texts[n][1:]] for n in chosen]
    answers: dict[str, set[str]] = {}
    for first, second, *_ in rows.texts:
        answers.setdefault(first, set()).add(second)
    right = [{i for i, text in enumerate(candidates) if text in answers[anchor]} for anchor in anchors]

    def scores(model: Any) -> list[NDArray[Any]]:
        return _cosines(model.encode_query, anchors, model.encode_document, candidates, allowed)

    expected_texts = [rows.texts[n][1] for n in chosen]
    return FirstTexts("The nearest text", anchors, candidates, allowed, right, expected_texts, scores)


def _of_classes(rows: TextRows, chosen: list[int]) -> Examples | None:
    others = spread(len(rows), _CANDIDATES)
    candidates = [rows.texts[n][0] for n in others]
    allowed = {n: [i for i, text in enumerate(candidates) if text != rows.texts[n][0]] for n in chosen}
    usable = [n for n in chosen if allowed[n]]
    anchors = [rows.texts[n][0] for n in usable]
    if not anchors:
        return None

    def scores(model: Any) -> list[NDArray[Any]]:
        return _cosines(model.encode, anchors, model.encode, candidates, [allowed[n] for n in usable])

    return FirstTexts(
        "The nearest text", anchors, candidates, [allowed[n] for n in usable],
        right=[{i for i, n in enumerate(others) if rows.labels[n] == rows.labels[one]} for one in usable],
        expected=[str(rows.labels[n]) for n in usable],
        scores=scores,
        shown=[f"{rows.labels[n]}: {rows.texts[n][0]}" for n in others],
    )  # fmt: skip


def _embed(encode: Any, texts: list[str]) -> NDArray[Any]:
    found: NDArray[Any] = encode(texts, normalize_embeddings=True, show_progress_bar=False, convert_to_numpy=True)
    return found


def _cosines(
    of_anchors: Any, anchors: list[str], of_candidates: Any, candidates: list[str], allowed: list[list[int]]
) -> list[NDArray[Any]]:
    similar = _embed(of_anchors, anchors) @ _embed(of_candidates, candidates).T
    return [row[one] for row, one in zip(similar, allowed, strict=True)]


def _similarities(model: Any, pairs: list[tuple[str, ...]]) -> NDArray[Any]:
    first, second = (_embed(model.encode, [pair[side] for pair in pairs]) for side in (0, 1))
    found: NDArray[Any] = (first * second).sum(1)
    return found
