"""Chooses answers from logits, by the rules of Hugging Face's run_qa.py: the same logits give the same answers.

In each window the `n_best_size` best start and end tokens are paired, and invalid pairs are dropped. Over all windows of a
question, the pair with the largest sum of logits wins. With `no_answer`, the score of CLS stands for "no answer", which wins
if it is better by more than a threshold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.tasks.qa.features import Windows

__all__ = ["Answer", "Candidate", "choose_answers"]

Floats = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Candidate:
    text: str
    begin: int
    """Characters in the context; (0, 0) for the empty answer."""
    end: int
    start_logit: float
    end_logit: float
    probability: float = 0.0


@dataclass(frozen=True)
class Answer:
    id: str
    text: str
    probability: float
    """Softmax of the chosen candidate's score over the n best."""
    no_answer_lead: float | None
    """By how much the empty answer's score exceeds that of the best other; None without `no_answer`."""
    candidates: tuple[Candidate, ...]

    @property
    def chosen(self) -> Candidate:
        return next((c for c in self.candidates if c.text == self.text), self.candidates[0])


def choose_answers(
    windows: Windows,
    logits: Sequence[tuple[Floats, Floats]],
    *,
    n_best_size: int = 20,
    max_answer_length: int = 30,
    no_answer: bool = False,
    null_score_diff_threshold: float = 0.0,
) -> list[Answer]:
    """One answer per question, in order. `logits` are the start and end logits of each window, padded or not."""
    if len(logits) != len(windows):
        raise ValueError(f"logits: {len(logits)} rows for {len(windows)} windows")
    by_question: dict[int, list[int]] = {}
    for window, question in enumerate(windows.rows[:, 0].tolist()):
        by_question.setdefault(question, []).append(window)
    answers = []
    for number, question in enumerate(windows.questions):
        found: list[tuple[float, int, int, float, float]] = []
        null: tuple[float, float, float] | None = None
        for window in by_question.get(number, ()):
            start, end = logits[window]
            cls = int(windows.rows[window, 5])
            score = float(start[cls] + end[cls])
            if null is None or score < null[0]:
                null = (score, float(start[cls]), float(end[cls]))
            found += _pairs(windows, window, start, end, n_best_size, max_answer_length)
        candidates = _ranked(question.context, found, null if no_answer else None, n_best_size)
        answers.append(_choice(question.id, candidates, null, no_answer, null_score_diff_threshold))
    return answers


def _pairs(
    windows: Windows, window: int, start: Floats, end: Floats, n_best_size: int, max_answer_length: int
) -> list[tuple[float, int, int, float, float]]:
    """(score, first character, end character, start logit, end logit) of a window's candidates, best starts first."""
    at, spans = windows.context_of(window)
    starts, ends = _best(start, n_best_size), _best(end, n_best_size)
    first, last = starts[:, None] - at, ends[None, :] - at
    good = (first >= 0) & (last < len(spans)) & (last >= first) & (last - first + 1 <= max_answer_length)
    rows, columns = np.nonzero(good)
    scores = start[starts][rows] + end[ends][columns]
    return [
        (float(scores[i]), int(spans[first[row, 0], 0]), int(spans[last[0, column], 1]), float(start[starts[row]]),
         float(end[ends[column]]))
        for i, (row, column) in enumerate(zip(rows, columns, strict=True))
    ]  # fmt: skip


def _best(logits: Floats, count: int) -> NDArray[np.intp]:
    """Positions of the `count` largest logits, largest first; ties in run_qa.py's order."""
    return np.argsort(logits)[-1 : -count - 1 : -1]


def _ranked(
    context: str,
    found: list[tuple[float, int, int, float, float]],
    null: tuple[float, float, float] | None,
    n_best_size: int,
) -> list[Candidate]:
    if null is not None:
        found = [*found, (null[0], 0, 0, null[1], null[2])]
    best = sorted(found, key=lambda one: one[0], reverse=True)[:n_best_size]
    if null is not None and not any(begin == end == 0 for _, begin, end, _, _ in best):
        best.append((null[0], 0, 0, null[1], null[2]))
    candidates = [Candidate(context[begin:end], begin, end, s, e) for _, begin, end, s, e in best]
    if not candidates or (len(candidates) == 1 and not candidates[0].text):
        # No pair is valid, and run_qa.py then answers "empty".
        candidates.insert(0, Candidate("empty", 0, 0, 0.0, 0.0))
    scores = np.array([c.start_logit + c.end_logit for c in candidates])
    shares = np.exp(scores - scores.max())
    shares /= shares.sum()
    return [
        Candidate(c.text, c.begin, c.end, c.start_logit, c.end_logit, float(share))
        for c, share in zip(candidates, shares, strict=True)
    ]


def _choice(
    name: str,
    candidates: list[Candidate],
    null: tuple[float, float, float] | None,
    no_answer: bool,
    threshold: float,
) -> Answer:
    if not no_answer or null is None:
        return Answer(name, candidates[0].text, candidates[0].probability, None, tuple(candidates))
    best = next((c for c in candidates if c.text), candidates[0])
    lead = null[0] - best.start_logit - best.end_logit
    chosen = next((c for c in candidates if not c.text), best) if lead > threshold else best
    return Answer(name, chosen.text, chosen.probability, lead, tuple(candidates))
