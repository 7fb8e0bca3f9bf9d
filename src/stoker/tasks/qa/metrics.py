"""Exact match and F1 as SQuAD defines them, for v1.1 and for v2.0 with its unanswerable questions.

Answers are compared after lower-casing and after dropping punctuation, English articles and extra spaces; F1 compares
the two bags of words. With several accepted answers, the best score counts.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from stoker.tasks.qa.data import Question

__all__ = ["exact_match", "f1", "normalized", "squad", "squad_v2"]

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalized(answer: str) -> str:
    return " ".join(_ARTICLES.sub(" ", answer.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, truth: str) -> float:
    return float(normalized(prediction) == normalized(truth))


def f1(prediction: str, truth: str) -> float:
    """F1 as v1.1 computes it: 0 without common words, even if both are empty."""
    predicted, true = normalized(prediction).split(), normalized(truth).split()
    common = sum((Counter(predicted) & Counter(true)).values())
    if common == 0:
        return 0.0
    precision, recall = common / len(predicted), common / len(true)
    return 2 * precision * recall / (precision + recall)


def _f1_v2(prediction: str, truth: str) -> float:
    """v2.0: an empty answer is correct exactly if an empty one is expected."""
    if not normalized(prediction) or not normalized(truth):
        return float(normalized(prediction) == normalized(truth))
    return f1(prediction, truth)


def _best(score: Callable[[str, str], float], prediction: str, truths: Sequence[str]) -> float:
    return max((score(prediction, truth) for truth in truths), default=0.0)


def squad(predictions: Mapping[str, str], questions: Sequence[Question]) -> dict[str, float]:
    """v1.1: mean EM and F1 in percent over all questions; a question without a prediction counts as wrong."""
    if not questions:
        return {"exact_match": 0.0, "f1": 0.0}
    exact = fuzzy = 0.0
    for question in questions:
        if (prediction := predictions.get(question.id)) is not None:
            exact += _best(exact_match, prediction, question.answers)
            fuzzy += _best(f1, prediction, question.answers)
    return {"exact_match": 100.0 * exact / len(questions), "f1": 100.0 * fuzzy / len(questions)}


def squad_v2(
    predictions: Mapping[str, str],
    questions: Sequence[Question],
    no_answer: Mapping[str, float] | None = None,
    threshold: float = 1.0,
) -> dict[str, float]:
    """v2.0: scores over all questions, over answerable and unanswerable ones, and the best that a threshold could reach.

    `no_answer` is a score per question that is higher the less answerable it seems; above `threshold` the prediction counts
    as empty. Without it, predictions are used as they are.
    """
    no_answer = no_answer or {}
    exact: dict[str, float] = {}
    fuzzy: dict[str, float] = {}
    answerable = {question.id: bool(question.answers) for question in questions}
    for question in questions:
        if (prediction := predictions.get(question.id)) is None:
            continue
        truths = [text for text in question.answers if normalized(text)] or [""]
        exact[question.id] = _best(exact_match, prediction, truths)
        fuzzy[question.id] = _best(_f1_v2, prediction, truths)

    def judged(raw: dict[str, float]) -> dict[str, float]:
        return {
            key: float(not answerable[key]) if no_answer.get(key, 0.0) > threshold else score
            for key, score in raw.items()
        }

    result: dict[str, float] = {}
    groups = {"": None, "HasAns_": True, "NoAns_": False}
    for prefix, wanted in groups.items():
        keys = [key for key in exact if wanted is None or answerable[key] is wanted]
        if not keys and wanted is not None:
            continue
        for name, raw in (("exact", exact), ("f1", fuzzy)):
            scores = judged(raw)
            result[prefix + name] = 100.0 * sum(scores[key] for key in keys) / max(len(keys), 1)
        result[prefix + "total"] = len(keys)
    for name, raw in (("exact", exact), ("f1", fuzzy)):
        result[f"best_{name}"], result[f"best_{name}_thresh"] = _best_threshold(predictions, raw, no_answer, answerable)
    return result


def _best_threshold(
    predictions: Mapping[str, str],
    raw: Mapping[str, float],
    no_answer: Mapping[str, float],
    answerable: Mapping[str, bool],
) -> tuple[float, float]:
    """The best score over all thresholds, and that threshold: questions turn from empty to answered in order of score."""
    current = best = float(sum(not answerable[key] for key in raw))
    threshold = 0.0
    for key in sorted(raw, key=lambda key: no_answer.get(key, 0.0)):
        if answerable[key]:
            current += raw[key]
        elif predictions[key]:
            current -= 1.0
        if current > best:
            best, threshold = current, no_answer.get(key, 0.0)
    return 100.0 * best / max(len(raw), 1), threshold
