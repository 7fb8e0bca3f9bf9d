"""Examples for the report: what is nearest to a text before and after training, and the pairs whose similarity is most wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from stoker.hf.checkpointing import random_state
from stoker.tasks.classify.metrics import ranks
from stoker.tasks.sentences.text_rows import LABELLED, PAIRS, SCORED, TextRows

__all__ = ["Examples", "choose_examples"]

_ANCHORS, _CANDIDATES, _PAIRS = 60, 300, 200
"""How many texts are embedded for the examples: enough to find interesting ones, in a few seconds."""
_LONGEST = 600


class Examples(Protocol):
    title: str

    def measure(self, model: Any) -> None:
        """Called before training and after it."""

    def rows(self, most: int) -> list[dict[str, Any]]:
        """The rows of the run log's `examples` entry."""


def choose_examples(rows: TextRows) -> Examples:
    if rows.kind == SCORED:
        return _Similarities([rows.texts[n] for n in _spread(len(rows), _PAIRS)],
                             np.array([rows.labels[n] for n in _spread(len(rows), _PAIRS)]))  # fmt: skip
    chosen = _spread(len(rows), _ANCHORS)
    anchors = [rows.texts[n][0] for n in chosen]
    if rows.kind == LABELLED:
        others = _spread(len(rows), _CANDIDATES)
        candidates = [rows.texts[n][0] for n in others]
        shown = [f"{rows.labels[n]}: {rows.texts[n][0]}" for n in others]
        right = [{i for i, n in enumerate(others) if rows.labels[n] == rows.labels[one]} for one in chosen]
        allowed = [[i for i, text in enumerate(candidates) if text != anchor] for anchor in anchors]
        expected = [str(rows.labels[one]) for one in chosen]
        return _Neighbours(anchors, candidates, shown, allowed, right, expected, asymmetric=False)
    if rows.kind == PAIRS:
        candidates = list(dict.fromkeys(rows.texts[n][1] for n in [*chosen, *_spread(len(rows), _CANDIDATES)]))
        allowed = [list(range(len(candidates)))] * len(anchors)
    else:
        candidates = list(dict.fromkeys(text for n in chosen for text in rows.texts[n][1:]))
        place = {text: i for i, text in enumerate(candidates)}
        allowed = [[place[text] for text in rows.texts[n][1:]] for n in chosen]
    answers: dict[str, set[str]] = {}
    for first, second, *_ in rows.texts:
        answers.setdefault(first, set()).add(second)
    right = [{i for i, text in enumerate(candidates) if text in answers[anchor]} for anchor in anchors]
    return _Neighbours(anchors, candidates, candidates, allowed, right, [rows.texts[n][1] for n in chosen])


def _spread(count: int, most: int) -> list[int]:
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(int)).tolist()  # type: ignore[no-any-return]


@dataclass
class _Neighbours:
    anchors: list[str]
    candidates: list[str]
    shown: Sequence[str]
    """How each candidate is written."""
    allowed: list[list[int]]
    """The candidates of each anchor."""
    right: list[set[int]]
    expected: list[str]
    asymmetric: bool = True
    """Anchors are queries and candidates documents, which some models embed with different prompts."""
    nearest: list[list[tuple[int, float]]] = field(default_factory=list)
    title = "The nearest text"

    def measure(self, model: Any) -> None:
        queries, documents = (
            (model.encode_query, model.encode_document) if self.asymmetric else (model.encode, model.encode)
        )
        with random_state.preserved():
            first, second = (
                encode(texts, normalize_embeddings=True, show_progress_bar=False, convert_to_numpy=True)
                for encode, texts in ((queries, self.anchors), (documents, self.candidates))
            )
        similar = first @ second.T
        found = []
        for row, allowed in zip(similar, self.allowed, strict=True):
            best = allowed[int(row[allowed].argmax())] if allowed else -1
            found.append((best, float(row[best])))
        self.nearest.append(found)

    def rows(self, most: int) -> list[dict[str, Any]]:
        """Anchors whose nearest text was wrong before and is right now come first, then those that are wrong now."""
        before, after = self.nearest[0], self.nearest[-1]
        usable = [n for n in range(len(self.anchors)) if self.allowed[n]]
        good = [n for n in usable if after[n][0] in self.right[n]]
        good.sort(key=lambda n: before[n][0] in self.right[n])
        bad = [n for n in usable if after[n][0] not in self.right[n]]
        return [self._row(n, before[n], after[n]) for n in [*good[:most], *bad[:most]]]

    def _row(self, number: int, before: tuple[int, float], after: tuple[int, float]) -> dict[str, Any]:
        return {
            "question": self.anchors[number][:_LONGEST],
            "before": self._text(before),
            "answer": self._text(after),
            "expected": [self.expected[number][:_LONGEST]],
            "right": after[0] in self.right[number],
        }

    def _text(self, found: tuple[int, float]) -> str:
        return f"{self.shown[found[0]][:_LONGEST]} ({found[1]:.2f})"


@dataclass
class _Similarities:
    pairs: list[tuple[str, ...]]
    scores: NDArray[Any]
    found: list[NDArray[Any]] = field(default_factory=list)
    title = "Similarity of pairs"

    def measure(self, model: Any) -> None:
        with random_state.preserved():
            first, second = (
                model.encode([pair[side] for pair in self.pairs], normalize_embeddings=True, show_progress_bar=False,
                             convert_to_numpy=True)
                for side in (0, 1)
            )  # fmt: skip
        self.found.append((first * second).sum(1))

    def rows(self, most: int) -> list[dict[str, Any]]:
        """Some pairs spread over all scores, then those whose rank by similarity is furthest from their rank by score."""
        wanted, got = ranks(self.scores), ranks(self.found[-1])
        errors = np.abs(wanted - got)
        spread = [int(np.argsort(self.scores, kind="stable")[n]) for n in _spread(len(self.pairs), most)]
        worst = [int(n) for n in np.argsort(-errors, kind="stable") if n not in spread][:most]
        return [
            {"question": None, "texts": [text[:_LONGEST] for text in self.pairs[n]],
             "before": f"similarity {self.found[0][n]:.2f}", "answer": f"similarity {self.found[-1][n]:.2f}",
             "expected": [f"score {self.scores[n]:g}, between {self.scores.min():g} and {self.scores.max():g}"],
             "right": bool(errors[n] <= len(self.pairs) / 4)}
            for n in [*spread, *worst]
        ]  # fmt: skip
