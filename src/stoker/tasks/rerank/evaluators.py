"""Evaluators of sentence-transformers for rerankers: ranking if queries have several documents, else classes or correlation."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stoker.tasks.rerank.features import as_scored, documents_of
from stoker.tasks.sentences.text_rows import CLASSED, PAIRS, TextRows

__all__ = ["RerankEvaluation", "Sample", "make_evaluation"]

_OTHERS = 19
"""Documents of other queries among which the right one must be found, where the data has no negatives."""


@dataclass(frozen=True)
class Sample:
    """A query with right and wrong documents."""

    query: str
    positive: list[str]
    negative: list[str]


@dataclass(frozen=True)
class RerankEvaluation:
    evaluator: Any
    metrics: tuple[str, ...]
    """Names of the metrics worth a line, without `eval_`; the last one is the main one."""
    samples: list[Sample]
    """What is ranked; empty if nothing is."""


def make_evaluation(rows: TextRows, corpus: Sequence[str], classes: Sequence[str], batch_size: int) -> RerankEvaluation:
    from sentence_transformers.cross_encoder import evaluation as st

    settings: dict[str, Any] = {"batch_size": batch_size, "write_csv": False, "show_progress_bar": False}
    if rows.kind == CLASSED:
        pairs, labels = [list(row) for row in rows.texts], [list(classes).index(label) for label in rows.labels]
        found = st.CrossEncoderClassificationEvaluator(pairs, labels, **settings)
        return RerankEvaluation(found, ("f1_micro", "f1_macro"), [])
    if samples := _samples(rows, corpus):
        sets = [{"query": one.query, "positive": one.positive, "negative": one.negative} for one in samples]
        ranking = st.CrossEncoderRerankingEvaluator(sets, at_k=10, **settings)
        return RerankEvaluation(ranking, ("map", "mrr@10", "ndcg@10"), samples)
    pairs = [list(row) for row in rows.texts]
    if {*rows.labels} == {0.0, 1.0}:
        labels = [int(label) for label in rows.labels]
        found = st.CrossEncoderClassificationEvaluator(pairs, labels, **settings)
        return RerankEvaluation(found, ("accuracy", "f1", "average_precision"), [])
    found = st.CrossEncoderCorrelationEvaluator(pairs, rows.labels, **settings)
    return RerankEvaluation(found, ("pearson", "spearman"), [])


def _samples(rows: TextRows, corpus: Sequence[str]) -> list[Sample]:
    """Queries with right and wrong documents; empty if most queries have only one document."""
    if rows.kind == PAIRS:
        return _among_others(rows, corpus)
    groups = documents_of(as_scored(rows))
    middle = max(score for one in groups for score in one.scores) / 2
    samples = []
    for one in groups:
        right = [text for text, score in zip(one.texts, one.scores, strict=True) if score > middle]
        wrong = [text for text, score in zip(one.texts, one.scores, strict=True) if score <= middle]
        if right and wrong:
            samples.append(Sample(one.query, right, wrong))
    return samples if 2 * len(samples) > len(groups) else []


def _among_others(rows: TextRows, corpus: Sequence[str], seed: int = 0) -> list[Sample]:
    """Each query with its documents, and some of other queries and of `corpus`, drawn with a fixed seed."""
    answers: dict[str, list[str]] = {}
    for query, document in rows.texts:
        answers.setdefault(query, []).append(document)
    documents = list(dict.fromkeys([*rows.column(1), *corpus]))
    draw = random.Random(seed)
    samples = []
    for query, right in answers.items():
        drawn = draw.sample(documents, min(_OTHERS + len(right), len(documents)))
        if wrong := [text for text in drawn if text not in right][:_OTHERS]:
            samples.append(Sample(query, right, wrong))
    return samples
