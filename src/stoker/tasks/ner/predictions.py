"""Writes predicted tags in the format of the data they are for: CoNLL columns, lists of tags, or entities by character."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from stoker.tasks.ner.data import Layout, Sentence
from stoker.tasks.ner.metrics import Entity
from stoker.whole_files import write_text

__all__ = ["entity_spans", "write_predictions"]


def write_predictions(
    folder: Path,
    layout: Layout,
    sentences: Sequence[Sentence],
    tags: Sequence[Sequence[str]],
    entities: Sequence[Sequence[Entity]],
    labels: Collection[str],
) -> Path:
    """Writes predictions.conll or predictions.jsonl; returns its path."""
    if layout.form == "conll":
        # If the file has tags already, the predicted ones replace them.
        lines = [fields for one in sentences for fields in one.origin]
        tagged = all(len(fields) > max(layout.label, 1) and fields[layout.label] in labels for fields in lines)
        parts = [
            _columns(one, predicted, layout.label if tagged else None)
            for one, predicted in zip(sentences, tags, strict=True)
        ]
    else:
        found = (
            [list(entity_spans(*one)) for one in zip(sentences, entities, strict=True)]
            if layout.form == "spans"
            else tags
        )
        parts = [
            json.dumps({**one.origin, layout.label: list(predicted)}, ensure_ascii=False, default=str)
            for one, predicted in zip(sentences, found, strict=True)
        ]
    path = folder / f"predictions.{'conll' if layout.form == 'conll' else 'jsonl'}"
    write_text(path, "".join(f"{part}\n" for part in parts), errors="replace")
    return path


def _columns(sentence: Sentence, predicted: Sequence[str], at: int | None) -> str:
    """The lines of a sentence, with the tag in place of that in column `at`, or as one more column."""
    lines = []
    for fields, tag in zip(sentence.origin, predicted, strict=True):
        parts = [*fields, tag] if at is None else list(fields)
        parts[-1 if at is None else at] = tag
        lines.append("\t".join(parts) + "\n")
    return "".join(lines)


def entity_spans(sentence: Sentence, found: Sequence[Entity]) -> Iterator[dict[str, Any]]:
    """The entities by character."""
    for first, last, kind in found:
        begin, end = sentence.words[first][0], sentence.words[last - 1][1]
        yield {"start": begin, "end": end, "label": kind, "text": sentence.text[begin:end]}
