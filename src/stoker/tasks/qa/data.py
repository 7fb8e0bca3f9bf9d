"""Reads questions about texts from the official nested SQuAD JSON (v1.1, v2.0) or from a flat table.

Rows that cannot be used are reported through `Faults` with their position; only valid questions are returned.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.english import with_article
from stoker.errors import UserError
from stoker.tasks.faults import Faults
from stoker.tasks.files import Row, is_unicode, kind_of, read_json, read_rows

__all__ = ["Question", "Unusable", "question_of", "read_questions"]


@dataclass(frozen=True, slots=True)
class Question:
    id: str
    question: str
    context: str
    answers: tuple[str, ...]
    """All accepted answers; empty for a question that the context does not answer."""
    starts: tuple[int, ...]
    """Where each answer begins in the context, in characters."""


class Unusable(ValueError):
    """A row that is not a valid question; the message says why."""


def read_questions(path: str | Path, *, training: bool, strict: bool = False, labelled: bool = True) -> list[Question]:
    """The valid questions of a file. With `training`, answers must be at their offsets; else only their text counts."""
    path = Path(path)
    faults = Faults(str(path), strict)
    rows = _rows(path, faults)
    questions = collect(rows, faults, training=training, labelled=labelled)
    faults.settle(len(questions))
    if not questions:
        raise UserError(f"{path} contains no questions")
    return questions


def collect(rows: Iterable[Row], faults: Faults, *, training: bool, labelled: bool = True) -> list[Question]:
    questions: list[Question] = []
    seen: set[str] = set()
    for number, row in enumerate(rows):
        try:
            question = question_of(row.values, str(number), training=training, labelled=labelled)
            if question.id in seen:
                raise Unusable(f"the id {question.id!r} has been used before")
        except Unusable as reason:
            faults.add(row.where, str(reason))
            continue
        seen.add(question.id)
        questions.append(question)
    return questions


def _rows(path: Path, faults: Faults) -> Iterator[Row]:
    if kind_of(path) == "json":
        content = read_json(path, lines_allowed=True)
        data = content.get("data") if isinstance(content, dict) else None
        if isinstance(data, list) and any(isinstance(item, dict) and "paragraphs" in item for item in data):
            return _nested(path, data, faults)
    return read_rows(path, faults)


def _nested(path: Path, data: list[Any], faults: Faults) -> Iterator[Row]:
    """The official layout: articles contain paragraphs, and these a context with its questions."""
    for a, article in enumerate(data, 1):
        place = f"{path}, article {a}"
        if not isinstance(article, dict) or not isinstance(article.get("paragraphs"), list):
            faults.add(place, "has no list of paragraphs")
            continue
        for p, paragraph in enumerate(article["paragraphs"], 1):
            inner = f"{place}, paragraph {p}"
            if not isinstance(paragraph, dict) or not isinstance(paragraph.get("qas"), list):
                faults.add(inner, "has no list of questions (qas)")
                continue
            context = paragraph.get("context")
            for q, entry in enumerate(paragraph["qas"], 1):
                where = f"{inner}, question {q}"
                if not isinstance(entry, dict):
                    faults.add(where, f"is {with_article(type(entry).__name__)}, not an object")
                    continue
                yield Row({**entry, "context": context}, where)


def question_of(values: dict[str, Any], default_id: str, *, training: bool, labelled: bool = True) -> Question:
    """The question in a row; raises Unusable with the reason if there is none."""
    for name in ("question", "context"):
        if name not in values:
            raise Unusable(f"has no column {name!r}; its columns are {', '.join(map(str, values)) or 'none'}")
        if not isinstance(values[name], str):
            raise Unusable(f"its {name} is {with_article(type(values[name]).__name__)}, not text")
        if not values[name].strip():
            raise Unusable(f"its {name} is empty")
        if not is_unicode(values[name]):
            raise Unusable(f"its {name} contains a lone surrogate (half a character, as from a wrong encoding)")
    context: str = values["context"]
    texts, starts = _answers(values) if labelled else ((), ())
    if str(values.get("is_impossible")).lower() in {"true", "1"}:
        texts, starts = (), ()  # some v2.0 files list plausible but wrong answers here
    if training:
        for text, start in zip(texts, starts, strict=True):
            if context[start : start + len(text)] != text or start < 0:
                found = context[max(start, 0) : max(start, 0) + len(text)]
                raise Unusable(f"answer {text!r} is not at its offset {start}, where the context reads {found!r}")
    identity = values.get("id")
    name = default_id if identity in (None, "") else str(identity)
    if not is_unicode(name):
        raise Unusable("its id contains a lone surrogate (half a character)")
    return Question(name, values["question"], context, texts, starts)


def _answers(values: dict[str, Any]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Answers as [{text, answer_start}], as {text: [...], answer_start: [...]}, as a string of either, or as two columns."""
    if "answers" in values:
        answers = _parsed(values["answers"])
    elif "answer_start" in values:
        text = values.get("answer_text", values.get("answer", values.get("text")))
        answers = {"text": _listed(text), "answer_start": _listed(values["answer_start"])}
    else:
        raise Unusable(f"has no column 'answers'; its columns are {', '.join(map(str, values))}")
    if isinstance(answers, list):
        if not all(isinstance(answer, dict) for answer in answers):
            raise Unusable("its answers are not objects with text and answer_start")
        answers = {key: [answer.get(key) for answer in answers] for key in ("text", "answer_start")}
    if not isinstance(answers, dict) or not {"text", "answer_start"} <= set(answers):
        raise Unusable("its answers have no text and answer_start")
    texts, starts = _listed(answers["text"]), _listed(answers["answer_start"])
    if len(texts) != len(starts):
        raise Unusable(f"it has {len(texts)} answers but {len(starts)} offsets")
    if not all(isinstance(text, str) and text and is_unicode(text) for text in texts):
        raise Unusable("one of its answers is empty or not text")
    try:
        return tuple(texts), tuple(int(start) for start in starts)
    except (TypeError, ValueError, OverflowError):
        raise Unusable(f"one of its offsets is not a number: {starts!r}") from None


def _listed(value: Any) -> list[Any]:
    if value is None or value == "":
        return []
    if hasattr(value, "tolist"):
        value = value.tolist()
    return list(value) if isinstance(value, list | tuple) else [value]


def _parsed(value: Any) -> Any:
    """Tables contain answers as JSON or as Python literals; both are parsed as data, never executed."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return []
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        pass
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        raise Unusable(f"its answers are neither JSON nor a Python literal: {value[:60]!r}") from None
