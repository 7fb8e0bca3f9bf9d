"""Run folders with invalid logs: every field of every kind of line with wrong values, and files that are not logs.

    for name, folder in variants(seed=1, into=tmp_path):
        ...  # `stoker report FOLDER` must end with exit code 0 or 2, without a traceback

`name` says what is wrong. A folder exists until the next one is requested. The same seed gives the same variants in the same
order: first those common to all seeds, then logs with several random faults at once.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

__all__ = ["GOOD", "MARKUP", "not_a_file", "variants"]

MARKUP = "\"'><script>alert(1)</script><img src=x onerror=alert(2)>"
"""Must appear on a page as text only. Many variants have it as a value, some as a name."""

_TIME = 1_700_000_000.25
GOOD: list[dict[str, Any]] = [
    {"kind": "start", "resumed_at": None, "task": "qa", "title": "A title", "model": "org/bert", "command": "stoker train qa",
     "versions": {"stoker": "1"}, "arguments": {"learning_rate": 3e-5}, "agents": [7], "processes": [8],
     "job": "slurm rig 7", "process": {"id": 7, "started": "8", "space": "9"},
     "machine": {"cpu": "A CPU", "system": "Linux", "cores": 2, "threads": 2, "memory": 16e9, "gflops": 160.0}},
    {"kind": "model", "name": "/some/where", "type": "BertForQuestionAnswering", "parameters": 1000, "steps": 3},
    {"kind": "applied", "parts": [["layer", "BertLayer", 2]], "left_alone": [["x", "why"]], "settings": {"precision": "fp32"}},
    {"kind": "lengths", "counts": [3, 9], "edges": [0, 50, 100], "mean": 60.0, "longest": 99, "rows": 12, "padded_to": 384},
    {"kind": "step", "step": 1, "loss": 2.0, "learning_rate": 1e-4, "tokens_per_second": 900.0, "padding_avoided": 0.5,
     "share_of_peak": 0.6, "peak": 2e11, "phases": {"forward": 0.3, "backward": 0.6}},
    {"kind": "evaluation", "step": 1, "eval_f1": 40.0, "eval_accuracy": 0.5},
    {"kind": "waits", "step": 2, "seconds": 0.5, "rows": [[1, 1, 0.25, 0.0], [2, 0, 0.0, 0.125]]},
    {"kind": "step", "step": 2, "loss": 1.0, "learning_rate": 5e-5, "tokens_per_second": 950.0, "padding_avoided": 0.5,
     "share_of_peak": 0.6, "peak": 2e11, "phases": {"forward": 0.3, "backward": 0.6}},
    {"kind": "evaluation", "step": 2, "eval_f1": 60.0, "eval_accuracy": 0.6},
    {"kind": "examples", "rows": [
        {"question": "Who?", "context": "It was Ada.", "answer": "Ada", "expected": ["Ada"], "begin": 7, "end": 10, "right": True,
         "probability": 0.9},
        {"texts": ["one", "two"], "answer": "yes", "expected": ["no"], "right": False, "probability": 0.4},
        {"context": "It was Ada.", "expected": ["It"], "right": False,
         "marks": [{"begin": 7, "end": 10, "label": "PER", "right": True}]}]},
    {"kind": "tables", "step": 2,
     "tables": [{"title": "Scores", "columns": ["", "F1"], "rows": [["PER", 0.5]], "note": "A note."}]},
    {"kind": "speed", "sides": {"stock": [2.0, 2.1], "Stoker": [0.5]}, "ratio": 4.0, "note": "Medians."},
    {"kind": "trained", "step": 2, "train_runtime": 301.0},
    {"kind": "end", "reason": "finished", "step": 2},
]  # fmt: skip
"""A log with every field that the page shows."""

_MISSING = object()
_ODD: dict[str, Any] = {
    "missing": _MISSING, "null": None, "true": True, "minus one": -1, "zero": 0, "a fraction": 0.5, "huge": 1e308,
    "beyond int64": 1 << 63, "400 digits": 10**400, "tiny": 5e-324, "NaN": float("nan"), "Infinity": float("inf"),
    "nan as text": "nan", "a number as text": "7", "empty text": "", "markup": MARKUP, "percent": "%s%n{}{{7*7}}{% raw %}",
    "long text": "long " * 2000, "half a character": "\ud800", "control characters": "\x00\x1b[31m\u202e\u2028",
    "mathtext": "$\\frac{", "empty list": [], "empty object": {}, "list of null": [None], "list of lists": [[], [1], [[2]]],
    "list of markup": [MARKUP], "object of markup": {MARKUP: MARKUP}, "object of lists": {"forward": [1], "step": [], "a": []},
    "nested": [[[[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]]],
}  # fmt: skip


def _places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of keys and indices to every value within a line."""
    if at:
        yield at
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _places(item, (*at, name))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _places(item, (*at, number))


def _with(line: dict[str, Any], at: tuple[Any, ...], value: Any) -> dict[str, Any]:
    changed: Any = json.loads(json.dumps(line))
    inner = changed
    for step in at[:-1]:
        inner = inner[step]
    if value is _MISSING:
        del inner[at[-1]]
    else:
        inner[at[-1]] = value
    return changed  # type: ignore[no-any-return]


def _as_bytes(lines: list[Any]) -> bytes:
    return b"".join(json.dumps({"time": _TIME, **line}).encode() + b"\n" for line in lines)


def _one_field_each() -> Iterator[tuple[str, bytes]]:
    seen = set()
    for number, line in enumerate(GOOD):
        for at in _places(line):
            where = f"{line['kind']}.{'.'.join(map(str, at))}"
            if where in seen:  # a kind of line that occurs twice in the log
                continue
            seen.add(where)
            for name, value in _ODD.items():
                yield f"{where} is {name}", _as_bytes([*GOOD[:number], _with(line, at, value), *GOOD[number + 1 :]])
    for name, value in _ODD.items():
        yield f"time is {name}", _as_bytes([_with({**GOOD[0], "time": 1}, ("time",), value), *GOOD[1:]])


def _broken_files() -> dict[str, bytes]:
    good = _as_bytes(GOOD)
    start = _as_bytes(GOOD[:1])
    return {
        "empty": b"",
        "only empty lines": b"\n \n\t\n",
        "no newline at the end": good.rstrip(),
        "cut in the middle": good[: len(good) // 2],
        "cut within a character": start + '{"kind": "end", "reason": "é'.encode()[:-1],
        "garbage": bytes(range(256)) * 40,
        "zeros": b"\0" * 4096,
        "zeros between lines": good.replace(b"\n", b"\0\n"),
        "a BOM": b"\xef\xbb\xbf" + good,
        "UTF-16": good.decode().encode("utf-16"),
        "Windows line ends": good.replace(b"\n", b"\r\n"),
        "all in one line": good.replace(b"\n", b" "),
        "a JSON list of lines": b"[" + good.strip().replace(b"\n", b",") + b"]",
        "lines that are no objects": b'1\n"text"\n[]\nnull\ntrue\n{}\nNaN\n' + good,
        "nested 100,000 times": b'{"kind": ' + b"[" * 100_000 + b"\n" + good,
        "nested 900 times": b'{"kind": "start", "arguments": {"a": ' + b"[" * 900 + b"]" * 900 + b"}}\n" + good,
        "5,000 digits": b'{"kind": "step", "step": ' + b"7" * 5000 + b"}\n" + good,
        "a name twice": b'{"kind": "step", "step": 1, "step": "<script>"}\n' + good,
        "unknown kinds": b'{"kind": "later", "step": "<script>"}\n{"kind": ""}\n{"kind": "\\ud800"}\n' + good,
        "everything twice": good + good,
        "backwards": b"".join(reversed(good.splitlines(keepends=True))),
        "no start": good[len(start) :],
        "only starts": start * 50,
        "resumed beyond the end": good + _as_bytes([{"kind": "start", "resumed_at": 1 << 40}, *GOOD[4:]]),
        "resumed before the beginning": good + _as_bytes([{"kind": "start", "resumed_at": 0}]),
        "only an end": _as_bytes(GOOD[-1:]),
        "an unfinished run at a step of markup": _as_bytes(
            [GOOD[0], {"kind": "trained", "step": 2}, {"kind": "step", "step": MARKUP}]
        ),
        "thousands of bad lines": b"{\n" * 5000 + good,
        "two sides of 500": _as_bytes([{"kind": "speed", "sides": {f"side {n}": [1.0] for n in range(500)}}]),
        "300 ranks": _as_bytes([{"kind": "waits", "step": 1, "rows": [[1, 7, *[0.5] * 300]]}]),
        "ranks that change": _as_bytes([{"kind": "waits", "step": 1, "rows": [[1, 1, 0.5, 0.1], [2, 0, 0.5, 0.1, 0.1]]}]),
        "a rank that is not there": _as_bytes([{"kind": "waits", "step": 1, "rows": [[1, 9, 0.5, 0.1]]}]),
        "losses of all sizes": _as_bytes(
            [{"kind": "step", "step": n, "loss": value, "tokens_per_second": value, "learning_rate": value}
             for n, value in enumerate((0.0, -1.0, 1e-300, 1e99, -1e99, 3.0, "inf", "nan", 5e-324))]
        ),
        "steps far apart": _as_bytes([{"kind": "step", "step": n, "loss": 1.0} for n in (0, 1, 1 << 53)]),
    }  # fmt: skip


def not_a_file() -> dict[str, Callable[[Path], None]]:
    """Puts something that is not a regular file in place of the log."""
    return {
        "a folder": lambda path: path.mkdir(),
        "a pipe": lambda path: os.mkfifo(path),
        "a link to itself": lambda path: path.symlink_to(path.name),
        "a link to nothing": lambda path: path.symlink_to("nothing"),
        "a link to an endless device": lambda path: path.symlink_to("/dev/zero"),
        "not readable": lambda path: (path.write_bytes(_as_bytes(GOOD)), path.chmod(0))[1],
        "missing": lambda path: None,
    }


def random_log(draw: random.Random) -> bytes:
    """Lines in random order with wrong fields, then with bytes flipped, removed or repeated."""
    lines = [json.loads(json.dumps(draw.choice(GOOD))) for _ in range(draw.randint(1, 20))]
    for _ in range(draw.randint(1, 6)):
        number = draw.randrange(len(lines))
        at = draw.choice(list(_places(lines[number])) or [("kind",)])
        lines[number] = _with(lines[number], at, draw.choice(list(_ODD.values())))
    raw = bytearray(_as_bytes(lines))
    for _ in range(draw.choice((0, 0, 1, 3, 20))):
        at = draw.randrange(len(raw))
        raw[at : at + draw.randint(0, 9)] = draw.choice((b"", b"\0", b'"', b"}", b"\n", b"\xff", b"<script>", b"1e999"))
    return bytes(raw)


def variants(seed: int, into: Path, *, more: int = 60) -> Iterator[tuple[str, Path]]:
    """(what is wrong, a run folder under `into`) for about 2,000 logs, of which `more` are drawn from `seed`."""
    draw = random.Random(seed)
    logs: list[tuple[str, Any]] = [*_one_field_each(), *_broken_files().items(), *not_a_file().items()]
    logs += [(f"random faults {number} of seed {seed}", random_log(draw)) for number in range(more)]
    for number, (name, content) in enumerate(logs):
        folder = into / f"run-{number}"
        folder.mkdir(parents=True)
        path = folder / "run.jsonl"
        if callable(content):
            content(path)
        else:
            path.write_bytes(content)
        try:
            yield name, folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
