"""Reads texts from files of any size, a few megabytes at a time: lines of text files, or a column of tables.

A source yields lists of texts, and has a fingerprint of its content. Texts that cannot be used are reported through `Faults`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from stoker.english import with_article
from stoker.errors import UserError
from stoker.tasks.faults import Faults
from stoker.tasks.files import Row, is_unicode, read_rows
from stoker.tasks.hub import Split
from stoker.user_files import stream_bytes

__all__ = ["FileTexts", "HubTexts", "Source", "is_table", "likeliest_column"]

_TABLES = (".json", ".csv", ".tsv", ".parquet")
_LINES = (".jsonl", ".ndjson")
_COLUMNS = ("text", "content", "sentence", "document", "body")
LONGEST_TEXT = 1 << 20
"""Characters of a line; longer ones are divided at a space. Tokenizers take time and memory for a line as a whole."""
TEXTS_TOGETHER = 1 << 21
"""Bytes, or characters, of texts in one list. Tokenizing takes about fifty times as much memory."""


def is_table(path: Path) -> bool:
    """Whether a file has columns; the others have a text per line."""
    return _suffix(path) in (*_TABLES, *_LINES)


def _suffix(path: Path) -> str:
    return Path(path.name.lower().removesuffix(".gz")).suffix


class Source(Protocol):
    @property
    def name(self) -> str:
        """The file or data set, as messages call it."""

    def fingerprint(self) -> str:
        """A hash of everything that the texts depend on."""

    def texts(self, faults: Faults) -> Iterator[list[str]]:
        """The texts that are not empty, in order."""


@dataclass(frozen=True)
class FileTexts:
    """The texts of a file: its lines, or a column of a table."""

    path: Path
    column: str | None = None

    @property
    def name(self) -> str:
        return str(self.path)

    @property
    def _kind(self) -> str:
        return _suffix(self.path)

    def fingerprint(self) -> str:
        digest = hashlib.blake2b(f"{self._kind} {self.path.suffix == '.gz'} {self.column}".encode(), digest_size=16)
        for piece in stream_bytes(self.path, "data file"):
            digest.update(piece)
        return digest.hexdigest()

    def texts(self, faults: Faults) -> Iterator[list[str]]:
        if self._kind in _TABLES and not (self._kind == ".json" and self._is_lines()):
            return _column(read_rows(self.path, faults, kept=False), self.column, faults)
        if self._kind in (*_LINES, ".json"):
            return _column(self._objects(faults), self.column, faults)
        return self.plain_lines(faults)

    def _pieces(self) -> Iterator[bytes]:
        return stream_bytes(self.path, "data file", gzipped=self.path.suffix.lower() == ".gz")

    def _is_lines(self) -> bool:
        """Whether a .json file has an object per line; then it need not be read as a whole."""
        first = next(self._pieces(), b"").removeprefix(b"\xef\xbb\xbf").lstrip()
        line, newline, rest = first.partition(b"\n")
        try:
            return bool(newline and rest.strip()) and isinstance(json.loads(line), dict)
        except (ValueError, RecursionError):
            return False

    def _blocks(self, longest: float = float("inf")) -> Iterator[tuple[int, bytes]]:
        """Whole lines of about `TEXTS_TOGETHER` bytes, with the number of the first one; lines of `longest` bytes are divided."""
        number, left = 1, b""
        for piece in self._pieces():
            left += piece
            if len(left) < TEXTS_TOGETHER:
                continue
            end = left.rfind(b"\n") + 1
            if not end and len(left) >= longest:
                end = _word_end(left)
            if not end:
                continue
            yield number, left[:end]
            number += left.count(b"\n", 0, end)
            left = left[end:]
        if left:
            yield number, left

    def _decoded(self, faults: Faults, longest: float = float("inf")) -> Iterator[tuple[int, list[str]]]:
        """Blocks of lines, with the number of the first one; lines that are not UTF-8 are reported, and empty."""
        for number, block in self._blocks(longest):
            if number == 1:
                block = block.removeprefix(b"\xef\xbb\xbf")
            try:
                lines = block.decode().split("\n")
            except UnicodeDecodeError:
                lines = []
                for at, raw in enumerate(block.split(b"\n"), number):
                    try:
                        lines.append(raw.decode())
                    except UnicodeDecodeError as error:
                        wrong = f"is not UTF-8 (byte 0x{raw[error.start]:02x} at {error.start})"
                        faults.add(f"{self.path}, line {at}", wrong)
                        lines.append("")
            yield number, lines

    def plain_lines(self, faults: Faults) -> Iterator[list[str]]:
        for number, lines in self._decoded(faults, 4 * LONGEST_TEXT):  # a character has at most four bytes
            if any("\0" in line for line in lines):
                at = next(n for n, line in enumerate(lines, number) if "\0" in line)
                raise UserError(
                    f"data file {self.path} cannot be read: it is not text (line {at:,} contains a zero byte)"
                )
            texts = [text for line in lines if (text := line.strip())]
            if max(map(len, texts), default=0) > LONGEST_TEXT:
                texts = [part for text in texts for part in _divided(text)]
            yield texts

    def _objects(self, faults: Faults) -> Iterator[Row]:
        for number, lines in self._decoded(faults):
            for at, line in enumerate(lines, number):
                if not line.strip():
                    continue
                where = f"{self.path}, line {at}"
                try:
                    values = json.loads(line)
                except (ValueError, RecursionError) as error:
                    faults.add(where, f"is not JSON: {getattr(error, 'msg', 'it is nested too deeply')}")
                    continue
                if isinstance(values, dict):
                    yield Row(values, where)
                else:
                    faults.add(where, f"is {with_article(type(values).__name__)}, not an object")


@dataclass(frozen=True)
class HubTexts:
    """The texts of a data set on the hub."""

    split: Split
    column: str | None = None

    @property
    def name(self) -> str:
        return self.split.name

    def fingerprint(self) -> str:
        digest = hashlib.blake2b(str(self.column).encode(), digest_size=16)
        for texts in self.texts(Faults(self.name)):
            digest.update("\0".join(texts).encode())
        return digest.hexdigest()

    def texts(self, faults: Faults) -> Iterator[list[str]]:
        return _column(self.split.rows(), self.column, faults)


def _word_end(block: bytes) -> int:
    """Where UTF-8 text can be divided: at its last space, else before its last character."""
    if (space := block.rfind(b" ")) > 0:
        return space
    return max((at for at in range(len(block) - 4, len(block)) if block[at] & 0xC0 != 0x80), default=len(block))


def _divided(text: str) -> Iterator[str]:
    """Parts of at most `LONGEST_TEXT` characters, divided at spaces where there are any."""
    begin = 0
    while len(text) - begin > LONGEST_TEXT:
        end = text.rfind(" ", begin + 1, begin + LONGEST_TEXT)
        end = begin + LONGEST_TEXT if end < 0 else end
        yield text[begin:end]
        begin = end
    yield text[begin:]


def _column(rows: Iterable[Row], column: str | None, faults: Faults) -> Iterator[list[str]]:
    texts: list[str] = []
    size = 0
    for row in rows:
        if column is None:
            column = likeliest_column(row.values)
        text: Any = row.values.get(column)
        if wrong := _wrong(text, column, row.values):
            faults.add(row.where, wrong)
            continue
        if text.strip():
            texts += _divided(text) if len(text) > LONGEST_TEXT else [text]
            size += len(text)
        if size > TEXTS_TOGETHER:
            yield texts
            texts, size = [], 0
    yield texts


def likeliest_column(values: dict[str, Any]) -> str:
    """The column with the texts, by its name."""
    found = next((name for name in _COLUMNS if name in values), None)
    if found is None:
        names = ", ".join(map(str, values)) or "none"
        raise UserError(f"no column looks like a text; name it with --text_column_name (columns: {names})")
    return found


def _wrong(text: Any, column: str, values: dict[str, Any]) -> str | None:
    if not isinstance(text, str):
        if column not in values:
            return f"has no column {column!r}; its columns are {', '.join(map(str, values)) or 'none'}"
        return f"its {column} is " + ("missing" if text is None else f"{with_article(type(text).__name__)}, not text")
    if not text.isascii() and not is_unicode(text):
        return f"its {column} contains a lone surrogate (half a character, as from a wrong encoding)"
    return None
