"""Entity precision, recall and F1 by seqeval in strict mode; which types are confused; and the report's tables of both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stoker.tasks.ner.tags import OUTSIDE, Scheme

__all__ = ["Entity", "Scores", "entities_of", "measure"]

Tags = Sequence[str]
Entity = tuple[int, int, str]
"""First word, word after the last, type."""

_OTHER_EDGES, _MISSED, _SPURIOUS = "other boundaries", "not found", "no entity"


@dataclass(frozen=True)
class Scores:
    precision: float
    recall: float
    f1: float
    accuracy: float
    """The share of words with the right tag."""
    types: dict[str, dict[str, float]]
    """Precision, recall, f1 and number by type."""
    confusion: dict[tuple[str, str], int]
    """How many entities of a type were found as which type, in other boundaries, or not at all."""
    untagged: float
    """The accuracy of tagging nothing."""

    def flat(self, *, by_type: bool) -> dict[str, float]:
        """The names of run_ner.py."""
        found = {"precision": self.precision, "recall": self.recall, "f1": self.f1, "accuracy": self.accuracy}
        for kind, values in self.types.items() if by_type else ():
            found |= {f"{kind}_{name}": value for name, value in values.items()}
        return found

    def tables(self) -> list[dict[str, Any]]:
        """For the report."""
        rows = [
            [kind, *(f"{values[name]:.3f}" for name in ("precision", "recall", "f1")), f"{int(values['number']):,}"]
            for kind, values in self.types.items()
        ]
        scores = {"title": "Scores by type", "columns": ["", "precision", "recall", "F1", "in the data"], "rows": rows}
        found_as = [*self.types, _OTHER_EDGES, _MISSED]
        confused = [
            [kind, *(self.confusion.get((kind, other), 0) or "" for other in found_as)]
            for kind in (*self.types, _SPURIOUS)
        ]
        note = (
            "Rows: what is in the data; columns: what was found in exactly the same words. Entities that share only some words "
            "with one that was found are under “other boundaries”. The last row counts what was found where no entity is."
        )
        return [
            scores,
            {"title": "Which types are confused", "columns": ["", *found_as], "rows": confused, "note": note},
        ]


def entities_of(tags: Sequence[Tags], scheme: Scheme) -> list[list[Entity]]:
    """The entities of each sentence, as seqeval's strict mode counts them."""
    from seqeval.scheme import Entities

    found = Entities([list(one) for one in tags], scheme.seqeval)
    return [[(one.start, one.end, one.tag) for one in sentence] for sentence in found.entities]


def measure(true: Sequence[Tags], predicted: Sequence[Tags], scheme: Scheme) -> Scores:
    from seqeval.metrics import accuracy_score, classification_report

    gold, found = entities_of(true, scheme), entities_of(predicted, scheme)
    types = sorted({kind for sentence in (*gold, *found) for *_, kind in sentence})
    lists = [[list(one) for one in tags] for tags in (true, predicted)]
    accuracy = float(accuracy_score(*lists)) if any(lists[0]) else 0.0
    words = [tag for one in true for tag in one]
    untagged = words.count(OUTSIDE) / max(len(words), 1)
    if not types:  # seqeval cannot report on nothing
        return Scores(0.0, 0.0, 0.0, accuracy, {}, {}, untagged)
    report = classification_report(
        *lists, mode="strict", scheme=scheme.seqeval, output_dict=True, zero_division=0, digits=6
    )
    by_type = {
        kind: {"precision": float(one["precision"]), "recall": float(one["recall"]), "f1": float(one["f1-score"]),
               "number": int(one["support"])}
        for kind, one in ((kind, report[kind]) for kind in types)
    }  # fmt: skip
    micro = report["micro avg"]
    return Scores(
        float(micro["precision"]), float(micro["recall"]), float(micro["f1-score"]), accuracy, by_type,
        _confusion(gold, found), untagged,
    )  # fmt: skip


def _confusion(gold: Sequence[Sequence[Entity]], found: Sequence[Sequence[Entity]]) -> dict[tuple[str, str], int]:
    counts: Counter[tuple[str, str]] = Counter()
    for true, predicted in zip(gold, found, strict=True):
        by_place = {(begin, end): kind for begin, end, kind in predicted}
        for begin, end, kind in true:
            same = by_place.get((begin, end))
            counts[kind, same or (_OTHER_EDGES if _touches(begin, end, predicted) else _MISSED)] += 1
        counts.update((_SPURIOUS, kind) for begin, end, kind in predicted if not _touches(begin, end, true))
    return dict(counts)


def _touches(begin: int, end: int, entities: Sequence[Entity]) -> bool:
    return any(first < end and begin < last for first, last, _ in entities)
