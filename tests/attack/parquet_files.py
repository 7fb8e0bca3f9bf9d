"""Parquet files as training data: columns of every type, content that unpacks to far more than the memory, damaged bytes."""

from __future__ import annotations

import datetime
import decimal
import io
import random
from pathlib import Path
from typing import Any

from attack import odd
from attack.base import chats, entities, pairs, rows
from attack.case import Case
from attack.command_lines import GOOD_FILES, TASKS, flat, good_training

__all__ = ["parquet_file"]


def parquet_file(r: random.Random, base: Path) -> Case:
    task = r.choice(TASKS)
    content = _written(r, _table(r, task))
    if r.random() < 0.4:
        content = odd.damage(r, content)
    flag = r.choice(("--train_file", "--train_file", "--validation_file"))
    options = [option for option in good_training(task) if option[0] != flag] + [[flag, "bad.parquet"]]
    links = {"model": str(base / "model"), **{name: str(base / name) for name in GOOD_FILES}}
    return Case(["train", task, *flat(options)], {"bad.parquet": content}, links, writes=("out",), codes=(0, 1, 2))


def _good(task: str) -> list[dict[str, Any]]:
    if task == "qa":
        answer = {"text": ["Ada"], "answer_start": [0]}
        return [{"id": str(n), "context": "Ada wrote it.", "question": "Who?", "answers": answer} for n in range(12)]
    if task in ("embed", "rerank"):
        return pairs(12)
    if task == "mlm":
        return [{"text": row["sentence"]} for row in rows(40)]
    return {"sft": chats, "ner": entities}.get(task, rows)(16)


def _table(r: random.Random, task: str) -> Any:
    import pyarrow

    table = pyarrow.Table.from_pylist(_good(task))
    for _ in range(r.choice((0, 1, 1, 2))):
        at = r.randrange(table.num_columns)
        name = table.column_names[at]
        kind = r.random()
        if kind < 0.25 and task != "mlm":  # which trains on texts of any amount, for as long as it takes
            table = _huge(r, table, name)
        elif kind < 0.75:
            table = table.set_column(at, name, _column(r, table.num_rows))
        elif kind < 0.85:
            table = table.append_column(
                r.choice((name, "", odd.text(r).encode("utf-8", "replace").decode())), table.column(at)
            )
        elif kind < 0.9:
            table = table.slice(0, 0)
        elif table.num_columns > 1:
            table = table.remove_column(at)
    return table


def _column(r: random.Random, rows: int) -> Any:
    import pyarrow

    made = r.choice((
        lambda: pyarrow.nulls(rows),
        lambda: pyarrow.array([b"\xff\xfe"] * rows),
        lambda: pyarrow.array([datetime.datetime(2026, 1, 1)] * rows, pyarrow.timestamp("ns", "UTC")),
        lambda: pyarrow.array([decimal.Decimal("1.5")] * rows),
        lambda: pyarrow.array([1e400] * rows),
        lambda: pyarrow.array([None, *["x"] * (rows - 1)]) if rows else pyarrow.nulls(0),
        lambda: pyarrow.array(["x" * 20_000] * rows, pyarrow.large_string()),
        lambda: pyarrow.array([[("a", 1)]] * rows, pyarrow.map_(pyarrow.string(), pyarrow.int64())),
        lambda: pyarrow.array([[["x"]]] * rows),
        lambda: pyarrow.array([{"a": {"b": [1]}}] * rows),
        lambda: pyarrow.array([2**63 - 1] * rows, pyarrow.uint64()),
        lambda: pyarrow.array([odd.text(r).encode("utf-8", "replace").decode() for _ in range(rows)]),
        lambda: pyarrow.array([True] * rows),
        lambda: pyarrow.array([datetime.timedelta(days=1)] * rows),
    ))  # fmt: skip
    return made()


def _huge(r: random.Random, table: Any, name: str) -> Any:
    """One long text in every row. The file stores it once; unpacked it is several times the memory."""
    import pyarrow

    size, rows = r.choice(((1 << 24, 5_000), (1 << 27, 500)))  # more than 4 GB in the first rows
    texts = pyarrow.DictionaryArray.from_arrays(pyarrow.repeat(pyarrow.scalar(0, pyarrow.int32()), rows), ["x" * size])
    if not table.num_rows:
        return pyarrow.table({name: texts})
    others = {
        one: pyarrow.repeat(table.column(one)[0], rows)
        for one in set(table.column_names) - {name}
        if _repeats(table, one)
    }
    return pyarrow.table({name: texts, **others})


def _repeats(table: Any, name: str) -> bool:
    import pyarrow

    kind = table.schema.field(table.column_names.index(name)).type
    return bool(pyarrow.types.is_string(kind) or pyarrow.types.is_integer(kind))


def _written(r: random.Random, table: Any) -> bytes:
    import pyarrow
    import pyarrow.parquet

    options: dict[str, Any] = {
        "compression": r.choice(("none", "snappy", "zstd", "gzip")),
        "store_schema": r.random() < 0.5,
        "row_group_size": r.choice((1, 7, 1 << 20)) if table.num_rows < 100 else 1 << 20,
    }
    file = io.BytesIO()
    try:
        pyarrow.parquet.write_table(table, file, **options)
    except (pyarrow.ArrowException, ValueError, TypeError):  # not every type can be written
        return b"PAR1" + r.randbytes(40) + b"PAR1"
    return file.getvalue()
