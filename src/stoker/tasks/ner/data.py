"""Reads tagged sentences: CoNLL columns, rows with lists of words and tags, or texts with entities by character.

Every form becomes a text, the place of its words in it, and a tag for each word. What cannot be used is reported through
`Faults` with its position.
"""

from __future__ import annotations

import itertools
import json
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stoker.english import with_article
from stoker.errors import UserError
from stoker.tasks.faults import Faults
from stoker.tasks.files import Row, is_unicode, read_lines, read_rows
from stoker.tasks.ner.tags import OUTSIDE, Scheme, span_tags

__all__ = [
    "Columns", "Layout", "Sentence", "collect", "conll_layout", "converted", "is_conll", "layout_of", "read_sentences",
    "split_words",
]  # fmt: skip

_CONLL = (".conll", ".conll03", ".bio", ".iob", ".iob2", ".bioes", ".txt", ".tsv", ".ner")
_WORDS = ("tokens", "words")
_TAGS = ("ner_tags", "tags", "ner", "labels", "label")
_TEXT = ("text", "sentence", "content")
_ENTITIES = ("entities", "spans", "labels", "label", "annotations")
_BEGIN, _END = ("start", "start_offset", "begin"), ("end", "end_offset")
_KIND = ("label", "type", "tag", "entity_group", "entity")

# Scripts without spaces between words: each character is a word, so that an entity can begin and end at any of them.
_SINGLE = r"\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_SINGLE}]|[^\W{_SINGLE}]+|[^\w\s]")


@dataclass(frozen=True, slots=True)
class Sentence:
    where: str
    text: str
    words: tuple[tuple[int, int], ...]
    """Begin and end of each word in the text, in characters."""
    tags: tuple[str, ...] | None
    """One per word, as in the data; None without labels."""
    origin: Any
    """What predictions are written beside: the columns of each word, or the row."""


@dataclass(frozen=True)
class Columns:
    """The columns that options name: names, or numbers from 1 in a CoNLL file; None for the usual ones."""

    text: str | None = None
    label: str | None = None


@dataclass(frozen=True)
class Layout:
    """How some data is laid out."""

    form: str
    """conll (columns), tags (lists of words and tags), or spans (texts and entities)."""
    text: Any
    """The column of the words or the text: a name, or a position in a CoNLL file."""
    label: Any
    """The column of the tags or entities."""


class Unusable(ValueError):
    """A row without usable words and tags; the message says why."""


def is_conll(path: str | Path) -> bool:
    name = str(path).lower().removesuffix(".gz")
    return name.endswith(_CONLL)


def read_sentences(
    path: str | Path, columns: Columns, faults: Faults, *, labelled: bool
) -> tuple[Layout, list[Sentence]]:
    """The usable sentences of a file. The caller adds what it finds itself to the faults, and settles them."""
    path = Path(path)
    if not is_conll(path):
        return collect(read_rows(path, faults), columns, faults, labelled=labelled)
    layout = conll_layout(columns)
    return layout, _some(list(_conll(path, layout, faults, labelled)), faults)


def conll_layout(columns: Columns) -> Layout:
    text = _position(columns.text, "--text_column_name", 0)
    return Layout("conll", text, _position(columns.label, "--label_column_name", -1))


def _some(sentences: list[Sentence], faults: Faults) -> list[Sentence]:
    if faults.too_many(len(sentences)):
        faults.settle(len(sentences))
    if not sentences:
        raise UserError(f"{faults.source} contains no sentences")
    return sentences


def converted(sentences: Iterable[Sentence], scheme: Scheme, faults: Faults) -> list[Sentence]:
    """The sentences with tags in this scheme."""
    done = []
    for one in sentences:
        try:
            done.append(one if one.tags is None else replace(one, tags=scheme.convert(one.tags)))
        except ValueError as reason:
            faults.add(one.where, str(reason))
    return done


# CoNLL columns


def _position(name: str | None, flag: str, otherwise: int) -> int:
    if name is None:
        return otherwise
    if not re.fullmatch(r"[1-9]\d{0,2}", name, re.ASCII):
        raise UserError(
            f"{flag} {name}: the columns of a CoNLL file have no names; give the number of the column, from 1"
        )
    return int(name) - 1


def _conll(path: Path, layout: Layout, faults: Faults, labelled: bool) -> Iterator[Sentence]:
    """Sentences between blank lines; a word per line, with its columns separated by tabs or spaces."""
    lines: list[tuple[str, ...]] = []
    begin = 0
    for number, line in enumerate([*read_lines(path), ""], 1):
        if line.strip():
            begin = begin if lines else number
            fields = _fields(line)
            if lines or not _is_comment(fields):
                lines.append(fields)
        elif lines:
            where = f"{path}, line {begin}"
            try:
                if lines[0][0] != "-DOCSTART-":
                    yield _from_columns(lines, layout, where, labelled)
            except Unusable as reason:
                faults.add(where, str(reason))
            lines = []


def _fields(line: str) -> tuple[str, ...]:
    return tuple(line.split("\t") if "\t" in line else re.split(" +", line.strip(" ")))


def _is_comment(fields: Sequence[str]) -> bool:
    """A line such as `# id 17` before a sentence; a word `#` has a tag."""
    return (fields[0] == "#" or fields[0].startswith("# ")) and not re.fullmatch(r"O|[BIESLU]-.+|[A-Z_]+", fields[-1])


def _from_columns(lines: Sequence[tuple[str, ...]], layout: Layout, where: str, labelled: bool) -> Sentence:
    needed = max(layout.text + 1, layout.label + 1 if labelled else 0, 2 if labelled else 1)
    for number, fields in enumerate(lines, 1):
        if len(fields) < needed:
            missing = "a word and a tag" if needed == 2 else f"{needed} columns"
            raise Unusable(f"its word {number} ({' '.join(fields)[:40]!r}) does not have {missing}")
    words = [fields[layout.text] for fields in lines]
    tags = [fields[layout.label].strip() for fields in lines] if labelled else None
    return _from_words(words, tags, where, tuple(lines))


# Rows


def collect(rows: Iterable[Row], columns: Columns, faults: Faults, *, labelled: bool) -> tuple[Layout, list[Sentence]]:
    """The usable sentences of a table, whose first row decides which columns are used."""
    sentences: list[Sentence] = []
    layout: Layout | None = None
    for row in rows:
        if layout is None:
            layout = layout_of(row.values, columns, labelled)
        try:
            sentences.append(_from_row(row, layout, labelled))
        except Unusable as reason:
            faults.add(row.where, str(reason))
    found = _some(sentences, faults)
    assert layout is not None
    return layout, found


def layout_of(values: dict[str, Any], columns: Columns, labelled: bool) -> Layout:
    """The layout of a table whose first row has these values."""
    names = [str(name) for name in values]
    for name, flag in ((columns.text, "--text_column_name"), (columns.label, "--label_column_name")):
        if name is not None and name not in names and (labelled or flag == "--text_column_name"):
            raise UserError(f"there is no column {name!r} ({flag}); the columns are {', '.join(names)}")
    text = columns.text or _first((*_WORDS, *_TEXT), names)
    if text is None:
        raise UserError(
            f"no column looks like words ({', '.join(_WORDS)}) or a text ({', '.join(_TEXT)}); name it with --text_column_name "
            f"(columns: {', '.join(names)})"
        )
    spans = isinstance(values[text], str) and not _is_list(values[text])
    label = columns.label or _first(_ENTITIES if spans else _TAGS, names)
    if label is None and labelled:
        raise UserError(
            f"no column looks like {'entities' if spans else 'tags'}; name it with --label_column_name "
            f"(columns: {', '.join(names)})"
        )
    return Layout("spans" if spans else "tags", text, label or ("entities" if spans else "tags"))


def _first(candidates: Sequence[str], names: Sequence[str]) -> str | None:
    return next((name for name in candidates if name in names), None)


def _from_row(row: Row, layout: Layout, labelled: bool) -> Sentence:
    content, labels = row.values.get(layout.text), row.values.get(layout.label) if labelled else None
    if layout.form == "spans":
        if not isinstance(content, str):
            raise Unusable(f"its {layout.text} is {_kind(content)}, not text")
        entities = _entities(content, _listed(labels, layout.label)) if labelled else ()
        words = _split(content, entities)
        tags = span_tags(words, entities) if labelled else None
        return _checked(Sentence(row.where, content, words, tags, row.values))
    listed = _listed(labels, layout.label) if labelled else None
    if listed is not None and not all(isinstance(tag, str) for tag in listed):
        raise Unusable(f"its {layout.label} are not all names, such as B-PER and O")
    return _from_words(_listed(content, layout.text), listed, row.where, row.values)


def _listed(value: Any, name: str) -> list[Any]:
    """A list, or the list in a text: CSV contains lists as JSON."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if _is_list(value):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise Unusable(f"its {name} is not a JSON list") from None
    if not isinstance(value, list):
        raise Unusable(f"its {name} is {_kind(value)}, not a list")
    return value


def _is_list(value: Any) -> bool:
    return isinstance(value, str) and value.startswith("[") and value.endswith("]")


def _kind(value: Any) -> str:
    return "missing" if value is None else with_article(type(value).__name__)


def _from_words(words: Sequence[Any], tags: Sequence[str] | None, where: str, origin: Any) -> Sentence:
    """Joined by spaces, as the words would be written."""
    if not words:
        raise Unusable("it has no words")
    places: list[tuple[int, int]] = []
    at = 0
    for number, word in enumerate(words, 1):
        if not isinstance(word, str) or not word:
            raise Unusable(f"its word {number} is {'empty' if word == '' else with_article(type(word).__name__)}")
        places.append((at, at + len(word)))
        at += len(word) + 1
    if tags is not None and len(tags) != len(words):
        raise Unusable(f"it has {len(words)} words but {len(tags)} tags")
    if tags is not None and not all(tags):
        raise Unusable(f"its word {next(i for i, tag in enumerate(tags, 1) if not tag)} has no tag")
    return _checked(Sentence(where, " ".join(words), tuple(places), None if tags is None else tuple(tags), origin))


def _checked(sentence: Sentence) -> Sentence:
    if not sentence.words:
        raise Unusable("its text is empty")
    if not is_unicode(sentence.text) or not all(map(is_unicode, sentence.tags or ())):
        raise Unusable("it is not UTF-8, or contains a lone surrogate (half a character, as from a wrong encoding)")
    return sentence


# Texts with entities


def split_words(text: str) -> list[tuple[int, int]]:
    """The words of a text: letters and digits together, every other character by itself."""
    if not text.isascii():  # vowel signs and accents are letters here, and not in Python's \\w
        text = "".join("a" if unicodedata.category(one)[0] == "M" else one for one in text)
    return [match.span() for match in _WORD.finditer(text)]


def _split(text: str, entities: Sequence[tuple[int, int, str]]) -> tuple[tuple[int, int], ...]:
    """The words, cut where an entity begins or ends inside one."""
    cuts = sorted({edge for begin, end, _ in entities for edge in (begin, end)})
    words: list[tuple[int, int]] = []
    for begin, end in split_words(text):
        inside = [cut for cut in cuts if begin < cut < end] if cuts else []
        edges = [begin, *inside, end]
        words += itertools.pairwise(edges)
    return tuple(words)


def _entities(text: str, found: list[Any]) -> tuple[tuple[int, int, str], ...]:
    entities = sorted(_entity(text, one, number) for number, one in enumerate(found, 1))
    for (begin, end, kind), (after, until, other) in itertools.pairwise(entities):
        if after < end:
            raise Unusable(
                f"its entities {text[begin:end]!r} ({kind}) and {text[after:until]!r} ({other}) overlap; a word can belong to "
                "one only"
            )
    return tuple(entities)


def _entity(text: str, found: Any, number: int) -> tuple[int, int, str]:
    if isinstance(found, dict):
        parts: list[Any] = [
            next((found[name] for name in names if name in found), None) for names in (_BEGIN, _END, _KIND)
        ]
    else:
        parts = list(found) if isinstance(found, list | tuple) and len(found) == 3 else [None] * 3
    begin, end, kind = parts
    if (
        not isinstance(kind, str)
        or not kind
        or any(isinstance(p, bool) or not isinstance(p, int) for p in (begin, end))
    ):
        raise Unusable(f"its entity {number} has no start, end and label: {str(found)[:60]}")
    if not 0 <= begin < end <= len(text):
        raise Unusable(f"its entity {number} is at {begin} to {end}, and the text has {len(text)} characters")
    if isinstance(found, dict) and isinstance(found.get("text"), str) and found["text"] != text[begin:end]:
        raise Unusable(
            f"its entity {found['text'][:40]!r} is not at {begin}, where the text reads {text[begin:end][:40]!r}"
        )
    stripped = text[begin:end].strip()
    if not stripped:
        raise Unusable(f"its entity {number} contains no text")
    if kind == OUTSIDE:
        raise Unusable(f"its entity {number} has the label O, which stands for words outside of entities")
    begin = text.index(stripped[0], begin)
    return begin, begin + len(stripped), kind
