"""The texts and tables of a page about a run, as values for the templates, which escape them.

Nothing from a log is ever marked as safe HTML. Plots are made elsewhere, so this needs no other library.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.english import duration
from stoker.run_report.figures import median, waits_of
from stoker.run_report.log import Run, number
from stoker.run_report.score_names import SCORE_NAMES

__all__ = ["Status", "began", "joined", "sections", "status_of", "title_of"]

_TASKS = {
    "qa": "question answering",
    "classify": "classification",
    "fewshot": "classification from a few examples",
    "sft": "fine-tuning of a language model",
    "embed": "text embeddings",
    "ner": "named entities",
    "mlm": "masked language modeling",
    "rerank": "reranking",
    "demo": "question answering in an invented world",
}


_EXAMPLES = {"ner": "What it finds", "mlm": "What it fills in"}


def sections(run: Run) -> dict[str, Any]:
    """The values of all parts of `page.html.jinja` but the plots and the style sheet."""
    return {
        "title": title_of(run),
        "status": status_of(run),
        "tiles": _tiles(run),
        "waits": _waits(run),
        "tables": [
            {"note": None, **table}
            for kind in ("tables", "exports")
            for table in run.others.get(kind, {}).get("tables") or ()
        ],
        "examples": [_example(row) for row in run.others.get("examples", {}).get("rows") or ()],
        "examples_title": run.others.get("examples", {}).get("title")
        or _EXAMPLES.get(str(run.start.get("task")), "What it answers"),
        "applied": _applied(run),
        "facts": _facts(run),
        "command": run.start.get("command") or "",
        "arguments": sorted((run.start.get("arguments") or {}).items()),
        "version": (run.start.get("versions") or {}).get("stoker", ""),
        "note": run.bad_lines_note,
    }


def title_of(run: Run) -> str:
    if title := run.start.get("title"):
        return str(title)
    model = run.others.get("model", {})
    name = str(run.start.get("model") or model.get("name") or model.get("type") or "Training run")
    if "/" in name and (name.startswith((".", "/", "~")) or name.count("/") > 1):  # a folder, not a name on the hub
        parts = [part for part in Path(name).parts if part not in {"model", ".", "/"}]
        name = parts[-1] if parts else name
    task = _TASKS.get(str(run.start.get("task")), "")
    return f"{name}: {task}" if task else name


@dataclass(frozen=True)
class Status:
    good: bool
    pill: str
    details: str


def status_of(run: Run) -> Status:
    end = run.others.get("end")
    if end is not None and run.finished:
        return Status(True, "finished", began(run))
    if end is not None:
        return Status(False, "stopped", joined([(end.get("reason") or "")[:200], began(run)]))
    last = run.steps[-1]["step"] if run.steps else 0
    return Status(False, "not finished", joined([f"last seen at step {last}", began(run)]))


def began(run: Run) -> str:
    """When and on which CPU the run began."""
    moment = time.strftime("%d %B %Y, %H:%M", time.localtime(run.start.get("time") or 0)) if run.start else ""
    return joined([moment, (run.start.get("machine") or {}).get("cpu")])


def joined(parts: list[str | None]) -> str:
    return " · ".join(filter(None, parts))


def _tiles(run: Run) -> list[tuple[str, str]]:
    tiles = _score_tiles(run)
    speed = number(run.others.get("speed", {}), "ratio")
    if speed is not None:
        tiles.append((f"{speed:.1f}x", "faster than stock"))
    if run.steps:
        tiles.append((f"{median(run, 'tokens_per_second') or 0.0:,.0f}", "tokens per second"))
        for name, label in (("share_of_peak", "of the machine's peak"), ("padding_avoided", "padding avoided")):
            if (share := median(run, name)) is not None:
                tiles.append((f"{share:.0%}", label))
        tiles.append(_steps_tile(run))
    if seconds := number(run.others.get("trained", {}), "train_runtime"):
        tiles.append((duration(seconds), "of training"))
    return tiles


def _score_tiles(run: Run) -> list[tuple[str, str]]:
    tiles: list[tuple[str, str]] = []
    last = run.evaluations[-1] if run.evaluations else {}
    first = run.evaluations[0] if len(run.evaluations) > 1 else {}
    for name, label in SCORE_NAMES.items():
        value, before = number(last, f"eval_{name}"), number(first, f"eval_{name}")
        if value is not None:
            change = f", from {before:.3g}" if before is not None and first["step"] == 0 else ""
            shown = f"{value:,.1f}" if value > 1.5 else f"{value:.0%}" if label.startswith("of ") else f"{value:.3f}"
            tiles.append((shown, label + change))
    return tiles


def _steps_tile(run: Run) -> tuple[str, str]:
    last, planned = run.steps[-1]["step"], run.others.get("model", {}).get("steps")
    done = run.others.get("trained", {}).get("step")
    done = last if done is None else done
    return f"{done:,}", "steps" if not planned or done >= planned else f"of {planned:,} steps"


_STEPS_SHOWN = 200


def _waits(run: Run) -> dict[str, Any] | None:
    """For each step, the last rank to arrive and how long each rank waited; collapsed, because a run has many steps."""
    rows, _ = waits_of(run)
    if not rows:
        return None
    # If there are too many to show, those with the longest waits.
    worst = sorted(rows, key=lambda row: -max(row[2:]))[:_STEPS_SHOWN]
    return {
        "covers": f"the {len(worst)} longest of {len(rows)} steps" if len(rows) > len(worst) else f"{len(rows)} steps",
        "ranks": len(rows[0]) - 2,
        "rows": [
            (int(row[0]), int(row[1]), [f"{1000 * value:.0f}" for value in row[2:]])
            for row in sorted(worst, key=lambda row: row[0])
        ],
    }


def _example(row: dict[str, Any]) -> dict[str, Any]:
    probability = number(row, "probability")
    context, before, marked = row.get("context"), row.get("before"), row.get("marks") is not None
    if isinstance(before, str):
        question, texts = row.get("question"), [[_Part(text)] for text in row.get("texts") or ()]
    elif context is not None:
        if not marked:
            parts = _around_answer(context, row.get("begin"), row.get("end"), bool(row.get("right")))
        else:
            parts = _marked(context, row["marks"])
        question, texts = row.get("question"), [parts]
    else:
        question, texts = None, [[_Part(text)] for text in row.get("texts") or ()]
    right = row.get("right")
    # Of texts that a model generates, and of some that are only shown, nobody says whether they are right.
    judged = right is not None or (before is None and not marked)
    return {
        "judgement": ("right" if right else "wrong") if judged else "",
        "right": bool(right) if judged else None,
        "before": before if isinstance(before, str) else None,
        "question": question,
        "texts": texts,
        "answer": row.get("answer") or ("no answer" if before is None else "(nothing)"),
        "marked": marked,
        "expected": row.get("expected") or ([] if marked else ["no answer"]),
        "probability": None if probability is None else f"{probability:.0%}",
    }


@dataclass(frozen=True)
class _Part:
    """A piece of a text; `mark` is None if it is not marked, else whether what it stands for is right."""

    text: str
    mark: bool | None = None
    label: str = ""


def _around_answer(context: str, begin: int | None, end: int | None, right: bool) -> list[_Part]:
    """The text before the answer, the answer, and the text after it, shortened."""
    if begin is None or end is None or not begin < end <= len(context):
        return [_Part(context[:360] + ("..." if len(context) > 360 else ""))]
    first, last = max(begin - 170, 0), min(end + 170, len(context))
    before = ("..." if first else "") + context[first:begin]
    after = context[end:last] + ("..." if last < len(context) else "")
    return [_Part(before), _Part(context[begin:end], right), _Part(after)]


def _marked(context: str, marks: list[dict[str, Any]], most: int = 700) -> list[_Part]:
    """A text with its marks, shortened; marks that overlap or lie outside are left out."""
    parts, at = [], 0
    for mark in sorted(marks, key=lambda one: int(one["begin"])):
        begin, end = mark["begin"], mark["end"]
        if at <= begin < end <= min(len(context), most):
            label = "" if mark.get("label") is None else str(mark["label"])
            parts += [_Part(context[at:begin]), _Part(context[begin:end], bool(mark.get("right")), label)]
            at = end
    rest = context[at : max(at, most)]
    return [*parts, _Part(rest + ("..." if at + len(rest) < len(context) else ""))]


def _applied(run: Run) -> dict[str, Any] | None:
    entry = run.others.get("applied")
    if not entry:
        return None
    return {
        "parts": entry.get("parts") or (),
        "settings": [(name, value) for name, value in (entry.get("settings") or {}).items() if value],
        "left_alone": entry.get("left_alone") or (),
    }


def _facts(run: Run) -> list[tuple[str, str]]:
    machine, model = run.start.get("machine") or {}, run.others.get("model", {})
    versions = run.start.get("versions") or {}
    memory = machine.get("memory")
    peak = run.peak / 1e9 if run.peak else machine.get("gflops")
    rows = [
        ("Model", f"{model.get('type')}, {model.get('parameters') or 0:,} parameters" if model else None),
        ("Data", run.start.get("data")),
        ("Loss", run.start.get("loss")),
        ("CPU", machine.get("cpu")),
        ("Cores and threads", f"{machine.get('cores')} cores, {machine.get('threads')} threads" if machine else None),
        ("Memory", f"{memory / 1e9:.0f} GB" if memory else None),
        ("Measured peak", f"{peak:.0f} GFLOP/s" if peak else None),
        ("System", machine.get("system")),
        ("Versions", ", ".join(f"{name} {value}" for name, value in versions.items())),
        ("Resumed at step", ", ".join(map(str, run.resumed_at))),
    ]
    return [(name, value) for name, value in rows if value]
