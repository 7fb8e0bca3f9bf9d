"""Reads rows from JSON, JSON lines, CSV, TSV, Parquet and text files, gzipped or not, each with its position in the file.

Problems of a single row go to `Faults`; a file that cannot be read raises UserError. The tasks interpret the columns.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.bounded import OutOfBounds, bounded
from stoker.english import with_article
from stoker.errors import UserError
from stoker.tasks.faults import Faults
from stoker.tasks.free_memory import available
from stoker.user_files import read_bytes, stream_bytes, too_large

__all__ = ["KINDS", "Row", "first_row", "is_unicode", "kind_of", "read_json", "read_lines", "read_rows", "text_fault"]

KINDS = ("json", "jsonl", "csv", "tsv", "parquet")
_SUFFIXES = {
    ".json": "json",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
}
_HEAD = 1 << 20
"""Bytes in which the first row of a file is looked for."""
_PARQUET_ROWS = 256
"""Rows that are unpacked at a time."""


@dataclass(frozen=True)
class Row:
    values: dict[str, Any]
    where: str


def is_unicode(text: str) -> bool:
    """Whether a text can be encoded: JSON escapes can contain lone surrogates, which tokenizers reject."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def text_fault(name: str, value: Any) -> str | None:
    """Why the value of the column `name` is not a text to train on; None if it is one."""
    if value is None:
        return f"its {name} is missing"
    if not isinstance(value, str):
        return f"its {name} is {with_article(type(value).__name__)}, not text"
    if not value.strip():
        return f"its {name} is empty"
    if not is_unicode(value):
        return f"its {name} contains a lone surrogate (half a character, as from a wrong encoding)"
    return None


def kind_of(path: Path) -> str:
    """The format of a file by its suffix; raises UserError for an unknown one."""
    name = path.name.lower().removesuffix(".gz")
    kind = _SUFFIXES.get(Path(name).suffix)
    if kind is None:
        raise UserError(f"{path} has an unknown format; its name must end in {', '.join(_SUFFIXES)}, or that and .gz")
    return kind


def read_rows(
    path: Path, faults: Faults, *, texts: bool = False, header: Sequence[str] | None = None, kept: bool = True
) -> Iterator[Row]:
    """The rows of a table. JSON may be a list of rows, {"data": [rows]} or one row per line.

    With `texts`, a .txt file has a row for each paragraph, with the column `text`. `header` names the columns of a CSV or TSV
    file whose first line is a row. `kept`: the caller keeps all rows, so that a Parquet file must fit into the memory.
    """
    if texts and path.name.lower().removesuffix(".gz").endswith(".txt"):
        yield from _paragraphs(path)
        return
    kind = kind_of(path)
    if kind == "parquet":
        yield from _parquet_rows(path, kept)
    elif kind in {"csv", "tsv"}:
        yield from _delimited_rows(path, "\t" if kind == "tsv" else ",", faults, header)
    elif kind == "jsonl":
        yield from _line_rows(path, faults)
    else:
        content = read_json(path, lines_allowed=True)
        if content is None:
            yield from _line_rows(path, faults)
            return
        rows = content.get("data") if isinstance(content, dict) else content
        if not isinstance(rows, list):
            raise UserError(f'{path} contains neither a list of rows nor {{"data": [rows]}}')
        yield from _listed_rows(path, rows, faults)


def first_row(path: Path, *, texts: bool = False, header: Sequence[str] | None = None) -> Row | None:
    """The first row that `read_rows` gives; None if the beginning of a file does not tell which one that is."""
    faults = Faults(str(path))
    if texts and path.name.lower().removesuffix(".gz").endswith(".txt"):
        return Row({"text": ""}, f"{path}, line 1")
    kind = kind_of(path)
    if kind == "parquet":
        return next(_parquet_rows(path, kept=False), None)
    head = next(stream_bytes(path, "data file", gzipped=path.suffix.lower() == ".gz"), b"")[:_HEAD]
    if len(head) == _HEAD:  # whole lines
        head = head[: head.rfind(b"\n") + 1]
    if kind in {"csv", "tsv"}:
        return next(_delimited_rows(path, "\t" if kind == "tsv" else ",", faults, header, head), None) if head else None
    if kind == "json" and (match := _BEFORE_ROWS.match(head)):
        try:
            values, _ = json.JSONDecoder(parse_int=_integer).raw_decode(head[match.end() :].decode(errors="ignore"))
        except (ValueError, RecursionError):
            return None
        return Row(values, f"{path}, row 1") if isinstance(values, dict) else None
    first, _, others = head.lstrip().partition(b"\n")
    if kind == "json" and not (_is_object(first) and others.strip()):
        return None
    return next(_line_rows(path, faults, head), None)


_BEFORE_ROWS = re.compile(rb'(?:\xef\xbb\xbf)?\s*(?:\{\s*"data"\s*:\s*)?\[\s*')
"""What comes before the first row of a JSON file."""


def read_json(path: Path, *, lines_allowed: bool = False) -> Any:
    """The content of a JSON file. With `lines_allowed`, None for a file with one JSON object per line."""
    raw = _read_bytes(path)
    try:
        return json.loads(raw.decode("utf-8-sig"), parse_int=_integer)
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8: byte {error.start:,} is 0x{raw[error.start]:02x}; convert it") from None
    except json.JSONDecodeError as error:
        if lines_allowed and error.msg == "Extra data" and error.pos and _is_object(raw.lstrip().split(b"\n", 1)[0]):
            return None
        raise UserError(f"{path} is not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from None
    except RecursionError:
        raise UserError(f"{path} is nested too deeply to be a table of rows") from None


def read_lines(path: Path) -> list[str]:
    """The lines of a text file. Bytes that are not UTF-8 become lone surrogates, so that only their lines are lost."""
    text = _read_bytes(path).decode("utf-8-sig", errors="surrogateescape")
    return [line.removesuffix("\r") for line in text.split("\n")]


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line, parse_int=_integer), dict)
    except (ValueError, RecursionError):
        return False


def _read_bytes(path: Path) -> bytes:
    """Limited by the free memory: a small gzip file may unpack to any size."""
    return read_bytes(path, "data file", limit=available() or 1 << 40, gzipped=path.suffix.lower() == ".gz")


def _integer(text: str) -> int | str:
    """Numbers too large for Python's int or float stay text, which serves as an id or a label."""
    return int(text) if len(text) < 300 else text


def _listed_rows(path: Path, rows: list[Any], faults: Faults) -> Iterator[Row]:
    for number, values in enumerate(rows, 1):
        where = f"{path}, row {number}"
        if isinstance(values, dict):
            yield Row(values, where)
        else:
            faults.add(where, f"is {with_article(type(values).__name__)}, not a row of named columns")


def _line_rows(path: Path, faults: Faults, content: bytes | None = None) -> Iterator[Row]:
    """The rows of a file, or of what has been read of it."""
    for number, line in enumerate((_read_bytes(path) if content is None else content).splitlines(), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            values = json.loads(line.decode("utf-8-sig"), parse_int=_integer)
        except UnicodeDecodeError as error:
            faults.add(where, f"is not UTF-8 (byte 0x{line[error.start]:02x} at {error.start})")
            continue
        except json.JSONDecodeError as error:
            faults.add(where, f"is not JSON: {error.msg} at column {error.colno}")
            continue
        except RecursionError:
            faults.add(where, "is nested too deeply")
            continue
        if isinstance(values, dict):
            yield Row(values, where)
        else:
            found = "null" if values is None else with_article(type(values).__name__)
            faults.add(where, f"is {found}, not an object")


def _paragraphs(path: Path) -> Iterator[Row]:
    """One row for each paragraph; blank lines are between them."""
    raw = _read_bytes(path)
    try:
        lines = raw.decode("utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8: byte {error.start:,} is 0x{raw[error.start]:02x}; convert it") from None
    begin = 0
    for number, line in enumerate([*lines, ""]):
        if line.strip():
            continue
        if begin < number:
            yield Row({"text": "\n".join(lines[begin:number])}, f"{path}, line {begin + 1}")
        begin = number + 1


def _delimited_rows(
    path: Path, delimiter: str, faults: Faults, header: Sequence[str] | None = None, content: bytes | None = None
) -> Iterator[Row]:
    """The rows of a file, or of what has been read of it."""
    # Bytes that are not UTF-8 become lone surrogates, so that only the rows that contain them are lost.
    raw = _read_bytes(path) if content is None else content
    text = raw.decode("utf-8-sig", errors="surrogateescape")
    if header is None and delimiter == ",":
        delimiter = _separator(text.partition("\n")[0])
    # GLUE's TSV files contain unpaired quotation marks as plain text.
    csv.field_size_limit(1 << 30)
    lines = io.StringIO(text, newline="")
    reader = csv.reader(lines, delimiter=delimiter, quoting=csv.QUOTE_NONE if delimiter == "\t" else csv.QUOTE_MINIMAL)
    named = "--column_names" if header else "the first line"
    header = header or next(reader, None)
    if not header:
        raise UserError(f"{path} is empty; its first line must name the columns")
    if not all(map(is_unicode, header)):
        raise UserError(f"{path} is not UTF-8: its first line cannot be read; convert it")
    _check_columns(path, header, named)
    while True:
        try:
            fields = next(reader, None)
        except csv.Error as error:
            faults.add(f"{path}, line {reader.line_num}", str(error))
            continue
        if fields is None:
            return
        where = f"{path}, line {reader.line_num}"
        if not fields:
            continue
        if len(fields) != len(header):
            faults.add(where, f"has {len(fields)} columns where {named} names {len(header)}")
        elif not all(map(is_unicode, fields)):
            faults.add(where, "is not UTF-8")
        else:
            yield Row(dict(zip(header, fields, strict=True)), where)


def _next_batch(batches: Iterator[Any]) -> tuple[int, list[dict[str, Any]]]:
    """The size in bytes of the next batch of a Parquet file, and its rows; none at the end."""
    batch = next((one for one in batches if one.num_rows), None)
    if batch is None:
        return 0, []
    # Arrow may keep repeated values once, but every row has its own copy in Python.
    columns = [one.dictionary_decode() if hasattr(one, "dictionary_decode") else one for one in batch.columns]
    return sum(one.nbytes for one in columns), batch.to_pylist()


def _check_columns(path: Path, names: Sequence[str], named_by: str) -> None:
    """Raises UserError if two columns have the same name. Spreadsheets write several without a name, which no task reads."""
    twice = next((name for name, count in Counter(names).items() if count > 1 and name.strip()), None)
    if twice is not None:
        raise UserError(f"{path} has two columns with the name {twice!r} ({named_by}); rename or remove one of them")


def _separator(first_line: str) -> str:
    """What separates the columns that this line names. Spreadsheets write semicolons where the comma is the decimal mark."""
    return next((one for one in ",;\t" if one in first_line), ",")


def _parquet_rows(path: Path, kept: bool) -> Iterator[Row]:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise UserError(f"{path} is Parquet, which needs pyarrow: pip install 'stoker[parquet]'") from None
    if path.exists() and not path.is_file():
        raise UserError(f"data file {path} cannot be read: it is a folder, device or pipe")
    limit = available() or 1 << 40
    left, number = limit, 0
    try:
        table = parquet.ParquetFile(path)
        _check_columns(path, table.schema_arrow.names, "its schema")
        batches = table.iter_batches(batch_size=_PARQUET_ROWS)
        while True:
            # Repeated values are stored once: a small file may hold any amount, and one batch more than the memory.
            size, rows = bounded(lambda: _next_batch(batches), memory=left)
            if not rows:
                return
            left -= size if kept else 0
            if left < 0:
                raise too_large(path, "data file", limit)
            for values in rows:
                number += 1
                yield Row(values, f"{path}, row {number}")
    except OutOfBounds:
        raise UserError(
            f"data file {path} cannot be read: {_PARQUET_ROWS} of its rows need more memory than is free"
        ) from None
    except (OSError, ValueError) as error:  # pyarrow's own errors are ValueErrors
        raise UserError(f"{path} cannot be read as Parquet: {error}") from None
