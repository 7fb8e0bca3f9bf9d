"""Examples for the report, measured before and after training: the text that a model puts first, scores of pairs, classes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.hf.checkpointing import random_state
from stoker.tasks.classify.metrics import ranks
from stoker.tasks.shown_rows import spread

__all__ = ["Classes", "Examples", "FirstTexts", "PairScores"]

_LONGEST = 600


def _improved_first(before: Sequence[bool], after: Sequence[bool], most: int) -> list[int]:
    """Which examples to show, by whether each was right: those that became right, others that are right, then wrong ones."""
    good = sorted((n for n, right in enumerate(after) if right), key=lambda n: before[n])
    bad = [n for n, right in enumerate(after) if not right]
    return [*good[:most], *bad[:most]]


@dataclass
class Examples(ABC):
    title: str

    def measure(self, model: Any) -> None:
        """Called before training and after it; does not change the random numbers of training."""
        with random_state.preserved():
            self._measure(model)

    @abstractmethod
    def _measure(self, model: Any) -> None: ...

    @abstractmethod
    def rows(self, most: int) -> list[dict[str, Any]]:
        """The rows of the run log's `examples` entry, about `most` of each kind."""


@dataclass
class FirstTexts(Examples):
    """Which of its candidates a model puts first for a text."""

    anchors: list[str]
    candidates: list[str]
    allowed: list[list[int]]
    """The candidates of each anchor."""
    right: list[set[int]]
    expected: list[str]
    scores: Callable[[Any], list[NDArray[Any]]]
    """A model's scores of the allowed candidates of each anchor."""
    shown: Sequence[str] = ()
    """How each candidate is written, if not as it is."""
    found: list[list[tuple[int, float]]] = field(default_factory=list)

    def _measure(self, model: Any) -> None:
        first = []
        for allowed, scores in zip(self.allowed, self.scores(model), strict=True):
            best = int(scores.argmax())
            first.append((allowed[best], float(scores[best])))
        self.found.append(first)

    def rows(self, most: int) -> list[dict[str, Any]]:
        before, after = self.found[0], self.found[-1]
        were, are = ([one[n][0] in right for n, right in enumerate(self.right)] for one in (before, after))
        return [self._row(n, before[n], after[n]) for n in _improved_first(were, are, most)]

    def _row(self, number: int, before: tuple[int, float], after: tuple[int, float]) -> dict[str, Any]:
        return {
            "question": self.anchors[number][:_LONGEST],
            "before": self._text(before),
            "answer": self._text(after),
            "expected": [self.expected[number][:_LONGEST]],
            "right": after[0] in self.right[number],
        }

    def _text(self, found: tuple[int, float]) -> str:
        return f"{(self.shown or self.candidates)[found[0]][:_LONGEST]} ({found[1]:.2f})"


@dataclass
class PairScores(Examples):
    """How a model scores pairs."""

    pairs: list[tuple[str, ...]]
    expected: NDArray[Any]
    word: str
    """What the model's scores are called."""
    scores: Callable[[Any, list[tuple[str, ...]]], NDArray[Any]]
    found: list[NDArray[Any]] = field(default_factory=list)

    def _measure(self, model: Any) -> None:
        self.found.append(self.scores(model, self.pairs))

    def rows(self, most: int) -> list[dict[str, Any]]:
        """Some pairs spread over all scores, then those whose rank by the model is furthest from their rank in the data."""
        errors = np.abs(ranks(self.expected) - ranks(self.found[-1]))
        by_score = np.argsort(self.expected, kind="stable")
        chosen = [int(by_score[n]) for n in spread(len(self.pairs), most)]
        worst = [int(n) for n in np.argsort(-errors, kind="stable") if n not in chosen][:most]
        least, largest = self.expected.min(), self.expected.max()
        return [
            {
                "texts": [text[:_LONGEST] for text in self.pairs[n]],
                "before": f"{self.word} {self.found[0][n]:.2f}",
                "answer": f"{self.word} {self.found[-1][n]:.2f}",
                "expected": [f"score {self.expected[n]:g}, between {least:g} and {largest:g}"],
                "right": bool(errors[n] <= len(self.pairs) / 4),
            }
            for n in [*chosen, *worst]
        ]


@dataclass
class Classes(Examples):
    """Which class a model predicts for a text, or for a pair of texts."""

    texts: Sequence[tuple[str, ...]]
    expected: Sequence[str]
    predict: Callable[[Any], Sequence[tuple[str, float]]]
    """The class that a model predicts for each of `texts`, with its probability."""
    found: list[Sequence[tuple[str, float]]] = field(default_factory=list)

    def _measure(self, model: Any) -> None:
        self.found.append(self.predict(model))

    def rows(self, most: int) -> list[dict[str, Any]]:
        before, after = self.found[0], self.found[-1]
        were, are = ([one[n][0] == name for n, name in enumerate(self.expected)] for one in (before, after))
        return [
            {
                "texts": [text[:_LONGEST] for text in self.texts[n]],
                "before": _class(before[n]),
                "answer": _class(after[n]),
                "expected": [self.expected[n]],
                "right": are[n],
            }
            for n in _improved_first(were, are, most)
        ]


def _class(found: tuple[str, float]) -> str:
    return f"{found[0]} ({found[1]:.0%})"
