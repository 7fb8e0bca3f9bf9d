"""Reads labelled texts or pairs of texts from a table. `GLUE` lists the columns and metrics of each GLUE task."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.english import with_article
from stoker.errors import UserError
from stoker.tasks.faults import Faults
from stoker.tasks.files import Row, read_rows, text_fault

__all__ = [
    "GLUE", "Columns", "Example", "Labels", "Task", "choose_columns", "collect", "columns_of", "label_order", "read_examples",
    "text_columns",
]  # fmt: skip


@dataclass(frozen=True)
class Task:
    """Columns and metrics of a GLUE task."""

    texts: tuple[str, ...]
    metrics: tuple[str, ...]
    regression: bool = False
    parts: tuple[str, ...] = ("",)
    """Suffixes of the evaluation and test splits on the hub; the first is the main one."""


GLUE: dict[str, Task] = {
    "cola": Task(("sentence",), ("matthews_correlation",)),
    "mnli": Task(("premise", "hypothesis"), ("accuracy",), parts=("_matched", "_mismatched")),
    "mrpc": Task(("sentence1", "sentence2"), ("accuracy", "f1")),
    "qnli": Task(("question", "sentence"), ("accuracy",)),
    "qqp": Task(("question1", "question2"), ("accuracy", "f1")),
    "rte": Task(("sentence1", "sentence2"), ("accuracy",)),
    "sst2": Task(("sentence",), ("accuracy",)),
    "stsb": Task(("sentence1", "sentence2"), ("pearson", "spearmanr"), regression=True),
    "wnli": Task(("sentence1", "sentence2"), ("accuracy",)),
}

# Common column names, the most likely first. "#1 String" and "Quality" are those of MRPC's own files.
_FIRST = (
    "sentence1",
    "premise",
    "question1",
    "text1",
    "#1 string",
    "sentence",
    "text",
    "question",
    "review",
    "content",
)
_SECOND = ("sentence2", "hypothesis", "question2", "text2", "#2 string", "sentence")
_LABEL = ("label", "labels", "quality", "score", "gold_label", "class", "target")


@dataclass(frozen=True)
class Columns:
    texts: tuple[str, ...]
    label: str | None


@dataclass(frozen=True, slots=True)
class Example:
    id: str
    texts: tuple[str, ...]
    label: str | float | None
    """As in the file; None if it has none."""


@dataclass(frozen=True)
class Labels:
    """The classes in order; empty for regression."""

    names: tuple[str, ...]

    @classmethod
    def of(cls, examples: Sequence[Example], *known: Sequence[str]) -> Labels:
        """The first of the `known` lists that contains all labels of the examples; else these labels, sorted."""
        found = {str(example.label) for example in examples if example.label is not None}
        for names in known:
            if names and found <= set(names):
                return cls(tuple(names))
        return cls(tuple(sorted(found, key=label_order)))

    def number(self, label: str | float | None) -> int:
        return self.names.index(str(label))


def label_order(name: str) -> tuple[int, int, str]:
    """Sorts numbers first, by value."""
    try:
        return 0, int(name), name
    except ValueError:
        return 1, 0, name


def choose_columns(names: Sequence[str], texts: Sequence[str] | None, label: str | None, task: str | None) -> Columns:
    """The columns of texts and label: those named by options, those of the task, or the most likely by name."""
    lower = {name.lower(): name for name in names}

    def named(wanted: Sequence[str], flag: str) -> tuple[str, ...]:
        for name in wanted:
            if name.lower() not in lower:
                raise UserError(f"there is no column {name!r} ({flag}); the columns are {', '.join(names)}")
        return tuple(lower[name.lower()] for name in wanted)

    def likeliest(candidates: Sequence[str], but: Sequence[str] = ()) -> str | None:
        return next((lower[name] for name in candidates if name in lower and lower[name] not in but), None)

    if label is not None:
        chosen_label: str | None = named([label], "--label_column_name")[0]
    else:
        chosen_label = likeliest(_LABEL)
    if texts:
        return Columns(named(texts, "--text_column_names"), chosen_label)
    if task in GLUE and all(name in lower for name in GLUE[task].texts):
        return Columns(tuple(lower[name] for name in GLUE[task].texts), chosen_label)
    first = likeliest(_FIRST)
    if first is None:
        raise UserError(
            f"no column looks like a text; name them with --text_column_names (columns: {', '.join(names)})"
        )
    second = likeliest(_SECOND, but=(first,))
    if task in GLUE and len(GLUE[task].texts) == 1:
        second = None
    return Columns((first,) if second is None else (first, second), chosen_label)


def columns_of(
    row: Row, texts: Sequence[str] | None, label: str | None, task: str | None, *, labelled: bool
) -> Columns:
    """The columns of a table whose first row this is."""
    columns = choose_columns([str(name) for name in row.values], texts, label, task)
    if labelled and columns.label is None:
        raise UserError(f"{row.where}: no column looks like a label; name it with --label_column_name")
    return columns


def text_columns(text: str | None) -> list[str] | None:
    """The names in --text_column_names."""
    if not text:
        return None
    names = [name.strip() for name in text.split(",")]
    if len(names) > 2 or not all(names):
        raise UserError(f"--text_column_names {text}: name one column, or two for pairs of texts, separated by a comma")
    return names


def read_examples(
    path: str | Path,
    *,
    texts: Sequence[str] | None = None,
    label: str | None = None,
    task: str | None = None,
    regression: bool = False,
    labelled: bool = True,
    strict: bool = False,
) -> list[Example]:
    path = Path(path)
    faults = Faults(str(path), strict)
    examples = collect(
        read_rows(path, faults), faults, texts=texts, label=label, task=task, regression=regression, labelled=labelled
    )
    faults.settle(len(examples))
    if not examples:
        raise UserError(f"{path} contains no examples")
    return examples


def collect(
    rows: Iterable[Row],
    faults: Faults,
    *,
    texts: Sequence[str] | None,
    label: str | None,
    task: str | None,
    regression: bool,
    labelled: bool,
) -> list[Example]:
    examples: list[Example] = []
    columns: Columns | None = None
    for number, row in enumerate(rows):
        if columns is None:
            columns = columns_of(row, texts, label, task, labelled=labelled)
        values = [row.values.get(name) for name in columns.texts]
        if reason := next(filter(None, map(text_fault, columns.texts, values)), None):
            faults.add(row.where, reason)
            continue
        found: Any = row.values.get(columns.label) if columns.label else None
        if labelled:
            found, reason = _label(found, regression)
            if reason:
                faults.add(row.where, reason)
                continue
        identity = row.values.get("idx", row.values.get("id", number))
        examples.append(Example(str(identity), tuple(map(str, values)), found if labelled else None))
    return examples


def _label(value: Any, regression: bool) -> tuple[str | float | None, str | None]:
    if value is None or value == "":
        return None, "it has no label"
    if not isinstance(value, str | int | float):
        return None, f"its label is {with_article(type(value).__name__)}, not text or a number"
    if not regression:
        return (str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)), None
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    return (number, None) if math.isfinite(number) else (None, f"its label {value!r} is not a number")
