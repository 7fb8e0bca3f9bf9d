"""The same logits give the same answers as the usual recipe, written out here pair by pair."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from stoker.tasks.demo.world import make_world
from stoker.tasks.qa.answers import choose_answers
from stoker.tasks.qa.features import Windows, make_windows
from tasks.models import wordpiece


def usual(
    windows: Windows, logits: list[Any], question: int, n_best: int, longest: int, negative: bool, threshold: float
) -> Any:
    """Every pair of the n best starts and ends that makes an answer; the best by sum; ties by order of appearance."""
    pairs: list[tuple[float, str]] = []
    null = None
    context = windows.questions[question].context
    for window in np.nonzero(windows.rows[:, 0] == question)[0]:
        start, end = logits[window]
        at, spans = windows.context_of(int(window))
        score = start[0] + end[0]
        null = score if null is None else min(null, score)
        for first in np.argsort(start)[::-1][:n_best]:
            for last in np.argsort(end)[::-1][:n_best]:
                inside = at <= first < at + len(spans) and at <= last < at + len(spans)
                if inside and first <= last < first + longest:
                    pairs.append((start[first] + end[last], context[spans[first - at][0] : spans[last - at][1]]))
    ranked = sorted(pairs, key=lambda pair: -pair[0])[:n_best]
    if not ranked:
        return "" if negative and null > threshold else "empty"
    if negative and null - ranked[0][0] > threshold:
        return ""
    return ranked[0][1]


def random_logits(windows: Windows, seed: int, scale: float) -> list[tuple[np.ndarray, np.ndarray]]:
    chance = np.random.default_rng(seed)
    return [
        tuple((scale * chance.standard_normal(int(length))).astype(np.float32) for _ in range(2))  # type: ignore[misc]
        for length in windows.lengths
    ]


@pytest.fixture(scope="module")
def windows() -> Windows:
    return make_windows(
        make_world(24, seed=5, training=False), wordpiece(), max_seq_length=72, doc_stride=24, training=False
    )


def test_ties_are_broken_as_run_qa_breaks_them() -> None:
    windows = make_windows(
        make_world(12, seed=5, training=False), wordpiece(), max_seq_length=160, doc_stride=32, training=False
    )
    assert windows.lengths.max() > 80
    for seed in range(4):
        logits: list[Any] = [tuple(side.round() for side in row) for row in random_logits(windows, seed, scale=1.0)]
        for number, answer in enumerate(choose_answers(windows, logits, n_best_size=6)):
            assert answer.text == usual(windows, logits, number, 6, 30, False, 0.0)


@pytest.mark.parametrize("negative", [False, True])
@pytest.mark.parametrize(("n_best", "longest"), [(20, 30), (5, 4), (1, 1), (200, 300)])
def test_the_answers_are_those_of_run_qa(windows: Windows, negative: bool, n_best: int, longest: int) -> None:
    for seed in range(6 if n_best < 100 else 1):
        logits = random_logits(windows, seed, scale=3.0)
        threshold = (seed - 3) * 0.7
        answers = choose_answers(
            windows, logits, n_best_size=n_best, max_answer_length=longest, no_answer=negative,
            null_score_diff_threshold=threshold,
        )  # fmt: skip
        for number, answer in enumerate(answers):
            assert answer.text == usual(windows, logits, number, n_best, longest, negative, threshold)
            assert sum(candidate.probability for candidate in answer.candidates) == pytest.approx(1.0)


def test_a_clear_signal_is_found_in_any_window(windows: Windows) -> None:
    logits = random_logits(windows, 1, scale=0.1)
    window = int(np.nonzero(windows.rows[:, 0] == 3)[0][-1])
    at, spans = windows.context_of(window)
    logits[window][0][at + 2] = logits[window][1][at + 4] = 9.0
    answer = choose_answers(windows, logits)[3]
    assert answer.text == windows.questions[3].context[spans[2][0] : spans[4][1]]
    assert (answer.chosen.begin, answer.chosen.end) == (spans[2][0], spans[4][1])
    assert answer.probability > 0.9


def test_no_answer_wins_only_if_every_window_says_so(windows: Windows) -> None:
    logits = random_logits(windows, 1, scale=0.1)
    mine = np.nonzero(windows.rows[:, 0] == 0)[0]
    assert len(mine) > 1
    for window in mine:
        logits[window][0][0] = logits[window][1][0] = 9.0
    assert choose_answers(windows, logits, no_answer=True)[0].text == ""
    logits[mine[1]][0][0] = logits[mine[1]][1][0] = -9.0
    assert choose_answers(windows, logits, no_answer=True)[0].text != ""


def test_rows_must_match_windows(windows: Windows) -> None:
    with pytest.raises(ValueError, match="logits: 0 rows for"):
        choose_answers(windows, [])
