"""Evaluators of sentence-transformers for each kind of validation data: STS, retrieval, triplets.

With --matryoshka_dims each of them runs once per dimension.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stoker.errors import UserError
from stoker.tasks.sentences.text_rows import LABELLED, PAIRS, SCORED, TextRows

__all__ = ["Evaluation", "make_evaluation", "triplets_of_classes"]

_RETRIEVAL = ("cosine_accuracy@1", "cosine_recall@10", "cosine_mrr@10", "cosine_ndcg@10", "cosine_map@100")


@dataclass(frozen=True)
class Evaluation:
    evaluator: Any
    metrics: tuple[str, ...]
    """Names of the metrics worth a line, without `eval_`; the last one is the main one."""


def make_evaluation(rows: TextRows, corpus: Sequence[str], dims: Sequence[int], batch_size: int) -> Evaluation:
    """What is measured on validation data of this kind; `corpus` are further texts to search in."""
    from sentence_transformers.base.evaluation import SequentialEvaluator

    if not dims:
        return _of_kind(rows, corpus, batch_size, None)
    # The largest dimension comes last: it is the main score, that of embeddings that are not truncated.
    made = {dim: _of_kind(rows, corpus, batch_size, dim) for dim in sorted(dims)}
    return Evaluation(
        SequentialEvaluator([one.evaluator for one in made.values()]),
        tuple(f"dim_{dim}_{one.metrics[-1]}" for dim, one in made.items()),
    )


def _of_kind(rows: TextRows, corpus: Sequence[str], batch_size: int, dim: int | None) -> Evaluation:
    from sentence_transformers.sentence_transformer import evaluation as st

    settings: dict[str, Any] = {
        "batch_size": batch_size, "truncate_dim": dim, "write_csv": False, "name": f"dim_{dim}" if dim else "",
    }  # fmt: skip
    if rows.kind == SCORED:
        texts = rows.column(0), rows.column(1)
        if {*rows.labels} == {0.0, 1.0}:
            labels = [int(label) for label in rows.labels]
            found = st.BinaryClassificationEvaluator(*texts, labels, similarity_fn_names=["cosine"], **settings)
            return Evaluation(found, ("cosine_accuracy", "cosine_f1", "cosine_ap"))
        found = st.EmbeddingSimilarityEvaluator(*texts, rows.labels, similarity_fn_names=["cosine"], **settings)
        return Evaluation(found, ("pearson_cosine", "spearman_cosine"))
    if rows.kind == PAIRS:
        return Evaluation(st.InformationRetrievalEvaluator(**_retrieval(rows, corpus), **settings), _RETRIEVAL[:-1])
    triplets = triplets_of_classes(rows) if rows.kind == LABELLED else [rows.column(n) for n in range(3)]
    found = st.TripletEvaluator(*triplets, similarity_fn_names=["cosine"], **settings)
    return Evaluation(found, ("cosine_accuracy",))


def _retrieval(rows: TextRows, corpus: Sequence[str]) -> dict[str, Any]:
    """Each distinct first text is a query; the second texts and `corpus` are searched. A query may have several right answers."""
    from sentence_transformers.util import cos_sim

    documents = {text: str(n) for n, text in enumerate(dict.fromkeys([*rows.column(1), *corpus]))}
    queries = {text: str(n) for n, text in enumerate(dict.fromkeys(rows.column(0)))}
    relevant: dict[str, set[str]] = defaultdict(set)
    for query, document in rows.texts:
        relevant[queries[query]].add(documents[document])
    return {
        "queries": {number: text for text, number in queries.items()},
        "corpus": {number: text for text, number in documents.items()},
        "relevant_docs": dict(relevant),
        "score_functions": {"cosine": cos_sim},
    }


def triplets_of_classes(rows: TextRows, seed: int = 0) -> tuple[list[str], list[str], list[str]]:
    """For each text one of its class and one of another class, drawn with a fixed seed."""
    by_class: dict[str, list[int]] = defaultdict(list)
    for number, label in enumerate(rows.labels):
        by_class[label].append(number)
    draw = random.Random(seed)
    triplets = []
    for number, label in enumerate(rows.labels):
        same = [one for one in draw.sample(by_class[label], min(2, len(by_class[label]))) if one != number]
        other = [one for one in by_class if one != label]
        if same and other:
            negative = draw.choice(by_class[draw.choice(other)])
            triplets.append((rows.texts[number][0], rows.texts[same[0]][0], rows.texts[negative][0]))
    if not triplets:
        raise UserError("the validation data needs two or more classes, and two or more texts of one of them")
    anchors, positives, negatives = zip(*triplets, strict=True)
    return list(anchors), list(positives), list(negatives)
