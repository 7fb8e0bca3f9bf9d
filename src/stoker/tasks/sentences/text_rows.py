"""Reads pairs, triplets, pairs with scores and labelled texts; the columns tell which of them a file has.

Rows that cannot be used are reported through `Faults` with their position. What is trained on them is left to the tasks.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stoker.english import with_article
from stoker.errors import UserError
from stoker.numbers import finite_number
from stoker.tasks.faults import Faults
from stoker.tasks.files import Row, read_rows, text_fault

__all__ = [
    "CLASSED", "KINDS", "LABELLED", "PAIRS", "SCORED", "TRIPLETS", "Columns", "TextRows", "choose_columns", "collect",
    "column_list", "read_text_rows",
]  # fmt: skip

log = logging.getLogger("stoker")

PAIRS, TRIPLETS, SCORED = "pairs", "triplets", "pairs with scores"
LABELLED, CLASSED = "labelled texts", "pairs with classes"
KINDS = {
    PAIRS: "two texts that belong together, such as anchor and positive, query and passage, question and answer",
    TRIPLETS: "the same with one or more texts that do not, such as negative, or negative_1 to negative_5",
    SCORED: "two texts and a number, such as sentence1, sentence2 and score",
    LABELLED: "a text and its class, such as text and label",
}

# Common column names, the most likely first. "#1 String" and "Quality" are those of MRPC's own files.
_FIRST = (
    "anchor", "query", "question", "sentence1", "sentence_1", "sentence_a", "text1", "text_1", "text_a", "premise", "question1",
    "#1 string", "source",
)  # fmt: skip
_SECOND = (
    "positive", "pos", "positives", "answer", "response", "passage", "document", "context", "sentence2", "sentence_2",
    "sentence_b", "text2", "text_2", "text_b", "hypothesis", "entailment", "question2", "#2 string", "target_text", "documents",
    "docs", "passages", "candidates",
)  # fmt: skip
_NEGATIVE = re.compile(r"(?:negatives?|neg|contradiction)(?:_?(\d+))?")
_LABEL = (
    "score", "scores", "similarity_score", "similarity", "label", "labels", "relevance", "quality", "is_duplicate", "class",
    "category", "intent", "target",
)  # fmt: skip
_SINGLE = ("text", "sentence", "content", "review", "utterance", *_FIRST)


@dataclass(frozen=True)
class Columns:
    texts: tuple[str, ...]
    """In the order in which losses take them: anchor, positive, negatives."""
    label: str | None
    classes: bool = False
    """The labels of pairs are classes, not numbers."""

    @property
    def kind(self) -> str:
        if len(self.texts) == 1:
            return LABELLED
        if len(self.texts) > 2:
            return TRIPLETS
        return PAIRS if self.label is None else CLASSED if self.classes else SCORED

    @property
    def names(self) -> tuple[str, ...]:
        return self.texts if self.label is None else (*self.texts, self.label)


@dataclass(frozen=True)
class TextRows:
    """The usable rows of a file."""

    columns: Columns
    texts: list[tuple[str, ...]]
    labels: list[Any]
    """Numbers of scored pairs, classes (as text) of labelled texts and pairs with classes; empty for the other kinds."""

    @property
    def kind(self) -> str:
        return self.columns.kind

    def __len__(self) -> int:
        return len(self.texts)

    def column(self, number: int) -> list[str]:
        return [row[number] for row in self.texts]

    def first(self, most: int | None) -> TextRows:
        return self if most is None else replace(self, texts=self.texts[:most], labels=self.labels[:most])


def column_list(text: str | None, flag: str) -> list[str] | None:
    """The names in an option, which are separated by commas."""
    if text is None:
        return None
    names = [name.strip() for name in text.split(",")]
    if not all(names) or len({*names}) < len(names):
        raise UserError(f"{flag} {text}: write the names of different columns, separated by commas")
    return names


def choose_columns(names: Sequence[str], texts: Sequence[str] | None, label: str | None, source: str) -> Columns:
    """The columns that options name, or else the most likely ones by their names. The label `none` means that there is none."""
    lower = {name.lower(): name for name in reversed(names)}

    def named(wanted: str, flag: str) -> str:
        if wanted.lower() not in lower:
            raise UserError(f"{source} has no column {wanted!r} ({flag}); its columns are {_listed(names)}")
        return lower[wanted.lower()]

    def likeliest(candidates: Sequence[str]) -> str | None:
        return next((lower[name] for name in candidates if name in lower and lower[name] not in (texts or ())), None)

    ignored = label is not None and label.lower() == "none"
    chosen = None if ignored else named(label, "--label_column_name") if label is not None else likeliest(_LABEL)
    if texts:
        found = tuple(named(name, "--text_column_names") for name in texts)
        return _checked(found, None if len(found) > 2 and label is None else chosen, source)
    first, second = likeliest(_FIRST), likeliest(_SECOND)
    negatives = [lower[name] for name in sorted((n for n in lower if _NEGATIVE.fullmatch(n)), key=_number)]
    if first is not None and second is not None:
        return Columns((first, second, *negatives), None if negatives else chosen)
    if (single := likeliest(_SINGLE)) is not None and chosen is not None:
        return Columns((single,), chosen)
    known = "; ".join(f"{kind}: {columns}" for kind, columns in KINDS.items())
    raise UserError(
        f"{source} has no columns that can be trained on: its columns are {_listed(names)}; {known}; name them with "
        "--text_column_names and --label_column_name, or with --column_names if the first line of a CSV or TSV file is a row"
    )


def _number(name: str) -> tuple[int, str]:
    match = _NEGATIVE.fullmatch(name)
    return int(match[1] or 0) if match else 0, name


def _listed(names: Sequence[str], most: int = 12) -> str:
    shown = ", ".join(name if len(name) <= 40 else f"{name[:37]}..." for name in names[:most])
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")


def _checked(texts: tuple[str, ...], label: str | None, source: str) -> Columns:
    if len(texts) == 1 and label is None:
        raise UserError(f"{source}: a single text needs a class; name its column with --label_column_name")
    if len(texts) > 2 and label is not None:
        raise UserError(
            f"{source}: three or more texts are trained without a label; leave out --label_column_name, or name fewer texts"
        )
    if label in texts:
        raise UserError(f"{source}: {label} is named as a text and as the label")
    return Columns(texts, label)


def read_text_rows(
    path: str | Path,
    *,
    texts: Sequence[str] | None = None,
    label: str | None = None,
    names: Sequence[str] | None = None,
    classes: bool | None = False,
    strict: bool = False,
) -> TextRows:
    """The usable rows of a file. `names` are the columns of a CSV or TSV file without a header."""
    faults = Faults(str(path), strict)
    return collect(read_rows(Path(path), faults, header=names), faults, texts=texts, label=label, classes=classes)


def collect(
    rows: Iterable[Row],
    faults: Faults,
    *,
    texts: Sequence[str] | None = None,
    label: str | None = None,
    classes: bool | None = False,
) -> TextRows:
    """The usable rows; the columns of the first row decide what they are.

    `classes`: whether the labels of pairs are classes; None: they are if that of the first row is not a number.
    """
    columns: Columns | None = None
    found: list[tuple[str, ...]] = []
    labels: list[Any] = []
    for row in rows:
        if columns is None:
            columns = choose_columns([str(name) for name in row.values], texts, label, faults.source)
            if columns.kind == SCORED:
                first = row.values.get(columns.label or "")
                words = isinstance(first, str) and bool(first) and finite_number(first) is None
                columns = replace(columns, classes=words if classes is None else classes)
        expanded, reason = _read(row.values, columns)
        if reason is not None:
            faults.add(row.where, reason)
            continue
        found += [texts_of_row for texts_of_row, _ in expanded]
        labels += [value for _, value in expanded if value is not None]
    faults.settle(len(found))
    if columns is None or not found:
        raise UserError(f"{faults.source} contains no rows")
    if columns.kind == TRIPLETS:
        found, columns = _same_number_of_negatives(found, columns, faults.source)
    return TextRows(columns, found, labels)


Expanded = list[tuple[tuple[str, ...], Any]]
"""What a row of the file stands for: texts with their label. Lists of positives or of scored documents give several."""


def _read(values: dict[str, Any], columns: Columns) -> tuple[Expanded, str | None]:
    """The rows that a row of the file stands for, or the reason why it cannot be used."""
    parts: list[list[str]] = []
    for number, name in enumerate(columns.texts):
        value = values.get(name)
        several: list[Any] = value if isinstance(value, list) and number else [value]
        if not several:
            return [], f"its {name} is an empty list"
        for one in several:
            if (reason := text_fault(name, one)) is not None:
                return [], reason
        parts.append(several)
    if columns.kind in (LABELLED, CLASSED):
        label, reason = _class(values.get(columns.label or ""), columns.label)
        return ([(tuple(part[0] for part in parts), label)], None) if reason is None else ([], reason)
    if columns.kind == SCORED:
        return _scored(parts[0][0], parts[1], values.get(columns.label or ""), columns)
    negatives = [text for part in parts[2:] for text in part]
    return [((parts[0][0], positive, *negatives), None) for positive in parts[1]], None


def _class(value: Any, name: str | None) -> tuple[str | None, str | None]:
    if value is None or value == "":
        return None, f"it has no {name}"
    if not isinstance(value, str | int | float):
        return None, f"its {name} is {with_article(type(value).__name__)}, not text or a number"
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value), None


def _scored(first: str, seconds: list[str], value: Any, columns: Columns) -> tuple[Expanded, str | None]:
    """A pair with its score; a list of documents has a list of scores."""
    scores = value if isinstance(value, list) else [value]
    if len(scores) != len(seconds):
        return [], f"it has {len(seconds)} {columns.texts[1]} and {len(scores)} values of {columns.label}"
    numbers = [_score(score) for score in scores]
    for score, number in zip(scores, numbers, strict=True):
        if number is None:
            missing = score is None or score == ""
            return [], f"it has no {columns.label}" if missing else f"its {columns.label} {score!r} is not a number"
    return [((first, second), number) for second, number in zip(seconds, numbers, strict=True)], None


def _score(value: Any) -> float | None:
    if isinstance(value, bool):  # as in columns such as is_duplicate
        return float(value)
    return finite_number(str(value)) if isinstance(value, str | int | float) else None


def _same_number_of_negatives(
    rows: list[tuple[str, ...]], columns: Columns, source: str
) -> tuple[list[tuple[str, ...]], Columns]:
    """Lists of negatives may differ in length; losses take as many of each row as the shortest has."""
    least, most = min(map(len, rows)), max(map(len, rows))
    names = columns.texts
    if least < most:
        log.warning(
            "%s: rows have %d to %d negatives; the first %d of each are used, because losses take equally many from every row. "
            "To use more, leave out the rows that have few",
            source, least - 2, most - 2, least - 2,
        )  # fmt: skip
    if least != len(names):
        names = (*names[:2], *(f"{names[2]}_{n}" for n in range(1, least - 1)))
    return [row[:least] for row in rows], Columns(names, None)
