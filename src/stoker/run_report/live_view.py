"""What the live page shows of a run: parts of the report as HTML, and curves as numbers that the page draws itself.

Drawing in the browser keeps matplotlib out of the process that watches, which shares its cores with the training.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from stoker.english import duration
from stoker.run_report.figures import SCORES, phase_totals, points, smooth, thinned, waits_of
from stoker.run_report.log import Run
from stoker.run_report.run_state import State, seconds_left
from stoker.run_report.sections import began, joined, sections
from stoker.run_report.templates import template

__all__ = ["live_page", "live_parts"]

_PARTS = ("header", "tiles", "waits", "examples", "tables", "about")
"""Blocks of the template that are sent when they have changed."""
_POINTS = 400
_RANKS_SHOWN = 16
_SCRIPT = Path(__file__).with_name("live_page.js")


def live_page(run: Run, state: State, quiet_for: float, folder: Path, nonce: str) -> str:
    """The whole page in its present state. Only the script and style sheet with this nonce may run."""
    script = Markup(_SCRIPT.read_text(encoding="utf-8"))
    values = _values(run, state, quiet_for)
    return template("live.html.jinja").render(nonce=nonce, script=script, folder=str(folder), **values)


def live_parts(run: Run, state: State, quiet_for: float) -> dict[str, Any]:
    """The parts of the page by name, for JSON: HTML, the charts, the title, and whether the run may continue."""
    page = template("live.html.jinja")
    blocks = {**template("page.html.jinja").blocks, **page.blocks}
    context = page.new_context(_values(run, state, quiet_for))
    parts: dict[str, Any] = {name: "".join(blocks[name](context)) for name in _PARTS}
    return {
        **parts,
        "title": f"{state.label} · {context['title']}",
        "charts": _charts(run),
        "continues": state.may_continue,
    }


def _values(run: Run, state: State, quiet_for: float) -> dict[str, Any]:
    values = sections(run)
    details = joined([state.details, "" if state.name == "waiting" else began(run)])
    values["status"] = {"tone": state.tone, "pill": state.label, "details": details}
    values["progress"] = _progress(run)
    if state.name == "waiting":
        values["title"] = "A training run"
    elif state.name == "running":
        values["tiles"] = _tiles_now(run, quiet_for) + values["tiles"]
    return values


def _progress(run: Run) -> float | None:
    """The share of the planned steps that is done."""
    planned = run.others.get("model", {}).get("steps")
    if not planned or run.finished:
        return None
    return float(min((run.steps[-1]["step"] if run.steps else run.start.get("resumed_at") or 0) / planned, 1.0))


def _tiles_now(run: Run, quiet_for: float) -> list[tuple[str, str]]:
    """What only a run in progress has; the other tiles are those of the report, over all steps so far."""
    tiles = []
    if (left := seconds_left(run, quiet_for)) is not None:
        tiles.append((duration(left) if left >= 1 else "under 1 s", "left"))
    loss = points(run.steps, "loss")[1]
    if loss:
        tiles.append((f"{smooth(loss[-100:])[-1]:.3g}", "loss, running mean"))
    return tiles


def _charts(run: Run) -> list[dict[str, Any]]:
    charts = [_scores(run), _loss(run), _throughput(run), _phases(run), _waits(run)]
    return [chart for chart in charts if chart is not None]


def _curve(steps: Sequence[float], values: Sequence[float], color: str, **more: Any) -> dict[str, Any]:
    steps, values = thinned(steps, values, _POINTS)
    return {
        "x": [int(step) for step in steps],
        "y": [float(f"{value:.5g}") for value in values],
        "color": color,
        **more,
    }


def _panel(title: str, curves: list[dict[str, Any]], run: Run, **more: Any) -> dict[str, Any]:
    return {"title": title, "curves": curves, "marks": run.resumed_at[-20:], **more}


def _scores(run: Run) -> dict[str, Any] | None:
    found = [(label, color, *points(run.evaluations, f"eval_{name}")) for name, label, color in SCORES]
    curves = [_curve(steps, values, color, name=label, dots=True) for label, color, steps, values in found if steps]
    if not curves:
        return None
    top = 100.0 if max(max(curve["y"]) for curve in curves) > 1.5 else 1.0
    panel = _panel("Evaluation", curves, run, top=top)
    return {"id": "scores", "panels": [panel], "caption": "On data that was not trained on."}


def _loss(run: Run) -> dict[str, Any] | None:
    steps, losses = points(run.steps, "loss")
    if not steps:
        return None
    many = len(steps) > 12
    curves = [_curve(steps, losses, "one", name="loss", faint=many, dots=not many)]
    if many:
        curves.append(_curve(steps, smooth(losses), "one", name="mean"))
    held_out = points(run.evaluations, "eval_loss")
    if held_out[0]:
        curves.append(_curve(*held_out, "three", name="evaluation", dots=True))
    panels = [_panel("Loss", curves, run, weight=3)]
    rates = points(run.steps, "learning_rate")
    if rates[0]:
        panels.append(
            _panel("Learning rate", [_curve(*rates, "two", name="learning rate")], run, weight=1, form="power")
        )
    notes = [
        "The bold line is a running mean." if many else "",
        "Green: on the evaluation data." if held_out[0] else "",
    ]
    return {"id": "loss", "panels": panels, "caption": " ".join(filter(None, notes))}


def _throughput(run: Run) -> dict[str, Any] | None:
    tokens = points(run.steps, "tokens_per_second")
    if not tokens[0]:
        return None
    panels = [_panel("Tokens per second", [_curve(*tokens, "three", name="tokens/s")], run, weight=1)]
    steps, shares = points(run.steps, "share_of_peak")
    if steps:
        curve = _curve(steps, [100 * share for share in shares], "four", name="of peak")
        panels.append(_panel("Share of the machine's measured peak", [curve], run, weight=1, form="percent", top=100.0))
    return {"id": "throughput", "panels": panels, "caption": "Real tokens only; padding is not counted."}


def _phases(run: Run) -> dict[str, Any] | None:
    totals = phase_totals(run)
    whole = sum(totals.values())
    if not whole:
        return None
    colors = ("one", "two", "three", "four", "five")
    bars = [
        {"name": name, "share": round(seconds / whole, 4), "text": f"{seconds / whole:.1%}", "color": color}
        for (name, seconds), color in zip(totals.items(), colors, strict=True)
    ]
    return {"id": "phases", "title": "Where a step's time went", "bars": bars, "caption": ""}


def _waits(run: Run) -> dict[str, Any] | None:
    rows, last_count = waits_of(run)
    if not rows:
        return None
    shown = sorted(sorted(range(len(last_count)), key=lambda rank: -last_count[rank])[:_RANKS_SHOWN])
    bars = []
    for rank in shown:
        share, mean = last_count[rank] / len(rows), 1000 * sum(row[2 + rank] for row in rows) / len(rows)
        text = f"{share:.0%}, waited {mean:.0f} ms itself"
        bars.append({"name": f"rank {rank}", "share": round(share, 4), "text": text, "color": "two"})
    slowest = max(shown, key=lambda rank: last_count[rank])
    caption = f"All ranks synchronize once per step; most often the others wait for rank {slowest}."
    return {"id": "waits-plot", "title": "Steps in which others waited for this rank", "bars": bars, "caption": caption}
