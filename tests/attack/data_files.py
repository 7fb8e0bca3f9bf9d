"""Invalid training data: tables, JSON and Parquet with arbitrary values, damaged bytes, and paths that are not regular files."""

from __future__ import annotations

import copy
import gzip
import io
import json
import random
from pathlib import Path
from typing import Any

from attack import odd
from attack.base import chats, entities, pairs, rows, scored_pairs, squad
from attack.case import Case
from attack.command_lines import GOOD_FILES, TASKS, flat, good_training

__all__ = ["data_file"]

_TOKENS = (
    b'"',
    b",",
    b"\t",
    b"\n",
    b"{",
    b"}",
    b"[",
    b"]",
    b":",
    b"\\",
    b"\\ud800",
    b"null",
    b"NaN",
    b"1e999",
    b"9" * 5000,
)
_VALUES: list[Any] = [
    None, True, False, 0, -1, 10**400, 1.5, float("nan"), float("inf"), "", " ", "\ud800", "x" * 20_000, [], {}, [[]], [None],
    {"text": 1}, {"text": ["Ada"], "answer_start": [3]}, {"text": [], "answer_start": []},
    {"text": ["Ada"], "answer_start": []},
    {"text": None, "answer_start": None}, {"text": ["Ada"], "answer_start": [10**30]}, {"text": "Ada", "answer_start": "3"}, "[1",
    "\0", "☃", "{'text': ['Ada'], 'answer_start': [3]}", "__import__('os').system('touch pwned')", "9" * 5000, "(" * 500,
]  # fmt: skip


def data_file(r: random.Random, base: Path) -> Case:
    """A data file for any task, used to train, evaluate or predict."""
    task = r.choice(TASKS)
    suffix = r.choice(
        ("json", "json", "jsonl", "csv", "tsv", "parquet", "txt", "ndjson", *(["conll"] if task == "ner" else []))
    )
    content = _content(r, task, suffix)
    if suffix == "parquet" or r.random() < 0.35:
        content = odd.damage(r, content, _TOKENS)
    name = f"bad.{suffix}"
    if r.random() < 0.15:
        name += ".gz"
        content = gzip.compress(content) if r.random() < 0.7 else content
        content = odd.damage(r, content) if r.random() < 0.4 else content
    files, links = {name: content}, {"model": str(base / "model")}
    for good in GOOD_FILES:
        links[good] = str(base / good)
    if r.random() < 0.05:
        del files[name]
        links[name] = r.choice(("/dev/zero", name, "/", "/proc/self/mem", "nowhere"))
    options = good_training(task)
    flags = ("--train_file", "--train_file", "--validation_file", "--test_file")
    flag = r.choice(flags[:3] if task in ("sft", "mlm") else flags)
    options = [option for option in options if option[0] != flag] + [[flag, name]]
    if flag == "--test_file":
        options.append(["--do_predict"])
    if flag != "--train_file" and task not in (
        "sft",
        "embed",
        "rerank",
        "fewshot",
    ):  # these train unless told otherwise
        options = [option for option in options if option[0] not in ("--do_train", "--train_file", "--max_steps")]
    for extra in (["--strict"], ["--version_2_with_negative"], ["--do_regression"], ["--text_column_names", "sentence"],
                  ["--label_column_name", "label"], ["--max_train_samples", "3"]):  # fmt: skip
        only_classify = "_column" in extra[0] or extra[0] == "--do_regression"
        belongs = "qa" if extra[0] == "--version_2_with_negative" else "classify" if only_classify else task
        belongs = "ner" if task == "ner" and extra[0] == "--label_column_name" else belongs
        belongs = task if task in ("embed", "rerank", "fewshot") and "_column" in extra[0] else belongs
        if r.random() < 0.1 and belongs == task:
            options.append(extra)
    return Case(["train", task, *flat(options)], files, links, writes=("out",), codes=(0, 1, 2))


def _content(r: random.Random, task: str, suffix: str) -> bytes:
    if task == "qa" and suffix == "json" and r.random() < 0.5:
        return _dump(_spoil(r, squad(12)))
    tables = {
        "qa": lambda: [_flat(number) for number in range(12)], "classify": lambda: rows(12), "fewshot": lambda: rows(12),
        "sft": lambda: chats(12) if r.random() < 0.7 else [{"instruction": "Who?", "input": "", "output": "Ada"}] * 12,
        "ner": lambda: entities(12) if r.random() < 0.5 else [{"tokens": ["Ada", "wrote"], "tags": ["B-PER", "O"]}] * 12,
        "mlm": lambda: [{"text": row["sentence"]} for row in rows(40)],
        "embed": lambda: r.choice((pairs, scored_pairs, rows))(12), "rerank": lambda: r.choice((pairs, scored_pairs))(12),
    }  # fmt: skip
    table = tables[task]()
    spoiled = _spoil(r, table) if r.random() < 0.8 else table
    return _written(r, spoiled, suffix)


def _flat(number: int) -> dict[str, Any]:
    paragraph = squad(1, number)["data"][0]["paragraphs"][0]
    entry = paragraph["qas"][0]
    answers = {"text": [entry["answers"][0]["text"]], "answer_start": [entry["answers"][0]["answer_start"]]}
    return {"id": entry["id"], "context": paragraph["context"], "question": entry["question"], "answers": answers}


def _spoil(r: random.Random, content: Any) -> Any:
    """Replaces or removes some values of nested lists and objects."""
    for _ in range(r.choice((1, 1, 2, 6))):
        places = list(_places(content))
        if not places:
            return content
        holder, key = r.choice(places)
        kind = r.random()
        if kind < 0.7:
            holder[key] = copy.deepcopy(r.choice(_VALUES))
        elif kind < 0.85:
            del holder[key]
        elif isinstance(holder, dict):
            holder[odd.value(r)] = holder.pop(key)
        else:
            holder.append(holder[key])
    return content if r.random() < 0.95 else copy.deepcopy(r.choice(_VALUES))


def _places(content: Any):  # type: ignore[no-untyped-def]
    if isinstance(content, dict | list):
        for key in list(content) if isinstance(content, dict) else range(len(content)):
            yield content, key
            yield from _places(content[key])


def _dump(content: Any) -> bytes:
    return json.dumps(content).encode()


def _written(r: random.Random, table: Any, suffix: str) -> bytes:
    if suffix == "conll":
        return b"\n".join(f"{odd.value(r)}\tO\nAda\tB-PER\n".encode("utf-8", "surrogatepass") for _ in range(12))
    if suffix in ("json", "txt"):
        return _dump(r.choice((table, {"data": table}, {"data": {"data": table}}, {"rows": table})))
    if not isinstance(table, list):
        table = [table]
    if suffix in ("jsonl", "ndjson"):
        return b"\n".join(map(_dump, table))
    objects = [row for row in table if isinstance(row, dict)] or [{}]
    if suffix == "parquet":
        return _parquet(objects)
    mark = "\t" if suffix == "tsv" else ","
    names = list(objects[0])
    quote = (
        (lambda text: text)
        if suffix == "tsv" or r.random() < 0.2
        else (lambda text: '"' + text.replace('"', '""') + '"')
    )
    lines = [mark.join(names)] + [mark.join(quote(str(row.get(name, ""))) for name in names) for row in objects]
    return r.choice(("\n", "\n", "\r\n", "\r")).join(lines).encode("utf-8", "surrogatepass")


def _parquet(objects: list[dict[str, Any]]) -> bytes:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.Table.from_pylist(objects)
        file = io.BytesIO()
        pyarrow.parquet.write_table(table, file)
        return file.getvalue()
    except (pyarrow.ArrowException, ValueError, OverflowError, TypeError):
        return b"PAR1" + _dump(objects) + b"PAR1"
