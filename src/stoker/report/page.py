"""report.html: one self-contained file about a run, made from its log. Everything that came from data is escaped."""

from __future__ import annotations

import os
import time
from html import escape
from pathlib import Path
from typing import Any

from stoker.errors import UserError
from stoker.report.log import Run, read_run
from stoker.report.plots import (
    lengths_plot,
    loss_plot,
    phases_plot,
    scores_plot,
    speed_plot,
    throughput_plot,
    waits_of,
    waits_plot,
)
from stoker.report.style import CSS

__all__ = ["render", "write_report"]

_TASKS = {"qa": "question answering", "classify": "classification", "demo": "question answering in an invented world"}


def write_report(folder: Path, output: Path | None = None) -> Path:
    """Makes the page from <folder>/run.jsonl. Raises FileNotFoundError without that log."""
    path = folder / "report.html" if output is None else output
    page = render(read_run(folder))
    beside = path.with_name(f".{path.name}.partial")
    try:
        beside.write_text(page, encoding="utf-8", errors="replace")
        os.replace(beside, path)
    except FileNotFoundError:  # not the log, which callers take this error for
        raise UserError(f"{path} cannot be written: there is no folder {path.parent}") from None
    return path


def render(run: Run) -> str:
    plots = [
        (scores_plot(run), "On data that was not trained on."),
        (loss_plot(run), "The bold line is a running mean."),
        (throughput_plot(run), "Real tokens only; padding is not counted."),
        (lengths_plot(run), "The shaded part is what padding would add to the average row."),
        (phases_plot(run), ""),
        (waits_plot(run), "All ranks meet once per step; whoever comes last makes the others wait."),
        (speed_plot(run), _speed_caption(run)),
    ]
    drawn = "".join(_plot(svg, caption) for svg, caption in plots if svg)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="stoker">
<title>{escape(_title(run))}</title>
<link rel="icon" href="data:,">
<style>{CSS}</style>
</head>
<body><main>
<header>
<h1>{escape(_title(run))}</h1>
<p class="sub">{_status(run)}{escape(_subtitle(run))}</p>
</header>
<section class="tiles">{"".join(_tile(value, label) for value, label in _tiles(run))}</section>
<h2>The run</h2>
<section class="plots">{drawn or '<p class="sub">Nothing was logged yet.</p>'}</section>
{_waits(run)}
{_examples(run)}
{_applied(run)}
<h2>Where and how</h2>
<section class="card"><table>{_facts(run)}</table></section>
<h2>Command</h2>
<pre>{escape(str(run.start.get("command", "")))}</pre>
{_arguments(run)}
<footer>Made by Stoker {escape(str(run.start.get("versions", {}).get("stoker", "")))} from run.jsonl;
<code>stoker report</code> makes it again.</footer>
</main></body>
</html>
"""


def _title(run: Run) -> str:
    if "title" in run.start:
        return str(run.start["title"])
    model = run.others.get("model", {})
    name = str(run.start.get("model") or model.get("name") or model.get("type") or "A training run")
    if "/" in name and (name.startswith((".", "/", "~")) or name.count("/") > 1):  # a folder, not a name on the hub
        parts = [part for part in Path(name).parts if part not in {"model", ".", "/"}]
        name = parts[-1] if parts else name
    task = _TASKS.get(str(run.start.get("task")), "")
    return f"{name}: {task}" if task else name


def _subtitle(run: Run) -> str:
    began = time.strftime("%d %B %Y, %H:%M", time.localtime(run.start.get("time", 0))) if run.start else ""
    cpu = run.start.get("machine", {}).get("cpu")
    return " · ".join(filter(None, (began, str(cpu) if cpu else "")))


def _status(run: Run) -> str:
    end = run.others.get("end")
    if end is None:
        last = run.steps[-1]["step"] if run.steps else 0
        return f'<span class="pill bad">not finished</span>last seen at step {last} · '
    if end.get("reason") == "finished":
        return '<span class="pill good">finished</span>'
    return f'<span class="pill bad">stopped</span>{escape(str(end.get("reason", ""))[:200])} · '


def _tile(value: str, label: str) -> str:
    return f'<div class="tile"><b>{escape(value)}</b><span>{escape(label)}</span></div>'


def _tiles(run: Run) -> list[tuple[str, str]]:
    tiles: list[tuple[str, str]] = []
    last = run.evaluations[-1] if run.evaluations else {}
    first = run.evaluations[0] if len(run.evaluations) > 1 else {}
    for name, label in (("f1", "F1"), ("exact_match", "exact match"), ("exact", "exact match"), ("accuracy", "accuracy"),
                        ("pearson", "Pearson"), ("matthews_correlation", "Matthews")):  # fmt: skip
        if isinstance(value := last.get(f"eval_{name}"), int | float):
            before = first.get(f"eval_{name}")
            came = f", from {before:.3g}" if isinstance(before, int | float) and first.get("step") == 0 else ""
            tiles.append((f"{value:.1f}" if value > 1.5 else f"{value:.3f}", label + came))
    speed = run.others.get("speed", {}).get("ratio")
    if isinstance(speed, int | float):
        tiles.append((f"{speed:.1f}x", "faster than stock"))
    if run.steps:
        tiles.append((f"{_median(run, 'tokens_per_second'):,.0f}", "tokens per second"))
        if any("share_of_peak" in one for one in run.steps):
            tiles.append((f"{_median(run, 'share_of_peak'):.0%}", "of the machine's peak"))
        if any("padding_avoided" in one for one in run.steps):
            tiles.append((f"{_median(run, 'padding_avoided'):.0%}", "padding avoided"))
        steps = run.others.get("model", {}).get("steps")
        done = run.others.get("trained", run.steps[-1]).get("step", run.steps[-1]["step"])
        tiles.append((f"{done:,}", "steps" if not steps or done >= steps else f"of {steps:,} steps"))
    if seconds := run.others.get("trained", {}).get("train_runtime"):
        tiles.append((_clock(float(seconds)), "of training"))
    return tiles


def _median(run: Run, name: str) -> float:
    values = sorted(float(one[name]) for one in run.steps if isinstance(one.get(name), int | float))
    return values[len(values) // 2] if values else 0.0


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _plot(svg: str | None, caption: str) -> str:
    told = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return f"<figure>{svg}{told}</figure>"


def _speed_caption(run: Run) -> str:
    return str(run.others.get("speed", {}).get("note", ""))


_STEPS_SHOWN = 200


def _waits(run: Run) -> str:
    """Step by step, which rank was waited for and for how long; folded, because a run has many steps."""
    rows, _ = waits_of(run)
    if not rows:
        return ""
    ranks = len(rows[0]) - 2
    # Where there are too many to show, those with the longest waits.
    worst = sorted(rows, key=lambda row: -max(row[2:]))[:_STEPS_SHOWN]
    head = "".join(f"<th>rank {rank}</th>" for rank in range(ranks))
    body = "".join(
        f"<tr><td>{int(row[0])}</td><td>rank {int(row[1])}</td>"
        + "".join(f'<td class="count">{1000 * float(value):.0f}</td>' for value in row[2:])
        + "</tr>"
        for row in sorted(worst, key=lambda row: row[0])
    )
    table = f"<table><tr><th>step</th><th>waited for</th>{head}</tr>{body}</table>"
    told = f"the {len(worst)} longest of {len(rows)} steps" if len(rows) > len(worst) else f"{len(rows)} steps"
    return (
        f"<details><summary>Which rank waited for which, in milliseconds: {told}</summary>"
        f'<section class="card">{table}</section></details>'
    )


def _examples(run: Run) -> str:
    rows = run.others.get("examples", {}).get("rows") or []
    if not rows:
        return ""
    return f'<h2>What it answers</h2><section class="examples">{"".join(map(_example, rows))}</section>'


def _example(row: dict[str, Any]) -> str:
    right = bool(row.get("right"))
    expected = " / ".join(escape(str(text)) for text in row.get("expected") or ["no answer"])
    given = escape(str(row.get("answer"))) or "no answer"
    verdict = f"<b>{given}</b>" if right else f"<b>{given}</b>, expected <b>{expected}</b>"
    score = row.get("probability")
    told = f" <span class='text'>({score:.0%})</span>" if isinstance(score, int | float) else ""
    if "context" in row:
        question = f'<p class="q">{escape(str(row.get("question")))}</p>'
        body = f'<p class="text">{_marked(str(row["context"]), row.get("begin"), row.get("end"))}</p>'
    else:
        question, body = "", "".join(f'<p class="text">{escape(str(text))}</p>' for text in row.get("texts", ()))
    kind = "right" if right else "wrong"
    return f'<article class="example {kind}">{question}{body}<p class="given">{verdict}{told}</p></article>'


def _marked(context: str, begin: Any, end: Any) -> str:
    """The part of a text around the answer, the answer marked."""
    if not isinstance(begin, int) or not isinstance(end, int) or not 0 <= begin < end <= len(context):
        return escape(context[:360]) + ("..." if len(context) > 360 else "")
    first, last = max(begin - 170, 0), min(end + 170, len(context))
    before = ("..." if first else "") + escape(context[first:begin])
    after = escape(context[end:last]) + ("..." if last < len(context) else "")
    return f"{before}<mark>{escape(context[begin:end])}</mark>{after}"


def _applied(run: Run) -> str:
    entry = run.others.get("applied")
    if not entry:
        return ""
    rows = "".join(
        f'<tr><th>{escape(str(part))}</th><td>{escape(str(kind))}</td><td class="count">{escape(str(count))}</td></tr>'
        for part, kind, count in entry.get("parts", ())
    )
    rows += "".join(
        f"<tr><th>{escape(name)}</th><td colspan=2>{escape(str(value))}</td></tr>"
        for name, value in entry.get("settings", {}).items()
        if value
    )
    rows += "".join(
        f"<tr><th>left alone: {escape(str(what))}</th><td colspan=2>{escape(str(why))}</td></tr>"
        for what, why in entry.get("left_alone", ())
    )
    return f'<h2>What was optimised</h2><section class="card"><table>{rows}</table></section>'


def _facts(run: Run) -> str:
    machine, model = run.start.get("machine", {}), run.others.get("model", {})
    memory = machine.get("memory")
    peak = run.peak / 1e9 if run.peak else machine.get("gflops")
    rows: list[tuple[str, Any]] = [
        ("Model", f"{model.get('type')}, {model.get('parameters', 0):,} parameters" if model else None),
        ("CPU", machine.get("cpu")),
        ("Cores and threads", f"{machine.get('cores')} cores, {machine.get('threads')} threads" if machine else None),
        ("Memory", f"{memory / 1e9:.0f} GB" if memory else None),
        ("Measured peak", f"{peak:.0f} GFLOP/s" if peak else None),
        ("System", machine.get("system")),
        ("Versions", ", ".join(f"{name} {value}" for name, value in run.start.get("versions", {}).items())),
        ("Resumed at step", ", ".join(map(str, run.resumed_at)) or None),
    ]
    return "".join(f"<tr><th>{escape(name)}</th><td>{escape(str(value))}</td></tr>" for name, value in rows if value)


def _arguments(run: Run) -> str:
    told = run.start.get("arguments")
    if not told:
        return ""
    rows = "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(str(value))}</td></tr>" for name, value in sorted(told.items())
    )
    table = f'<section class="card"><table>{rows}</table></section>'
    return f"<details><summary>All settings that were not left alone</summary>{table}</details>"
