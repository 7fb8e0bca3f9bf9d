"""The page of `stoker runs --html`: a table of runs and their curves over each other, in the style of the report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import matplotlib
from markupsafe import Markup
from matplotlib.ticker import FuncFormatter

from stoker.run_report.compare import Comparison, RunSummary
from stoker.run_report.compare_texts import figures, setting
from stoker.run_report.drawing import COLORS, MUTED, STYLE, as_svg, new_figure, style_axes
from stoker.run_report.figures import points, smooth
from stoker.run_report.log import number
from stoker.run_report.templates import template

__all__ = ["DRAWN", "Points", "curves", "draw_over_each_other", "line_of", "loss_curve", "render_overlay"]

_DASHES = ("", "5 3")
DRAWN = len(COLORS) * len(_DASHES)
"""Runs that can be told apart by the colour and the dashes of their curves."""
Points = tuple[Sequence[float], Sequence[float]]


def render_overlay(found: Sequence[Comparison]) -> str:
    count = sum(len(one.runs) for one in found)
    return template("overlay.html.jinja").render(
        title=f"{count} training runs" if count > 1 else "One training run", tasks=[_task(one) for one in found]
    )


def _task(found: Comparison) -> dict[str, Any]:
    """The values of one task in the template."""
    columns = found.columns
    rows = [
        {"number": i + 1, "name": one.name, "label": one.state.label, "tone": one.state.tone, "line": line_of(i),
         "figures": figures(one, found.metric), "settings": [setting(values[i]) for values in columns.values()]}
        for i, one in enumerate(found.runs)
    ]  # fmt: skip
    return {
        "name": found.task or "other runs", "metric": found.metric_name, "settings": list(columns), "rows": rows,
        "plots": curves(found), "drawn": min(DRAWN, len(rows)),
        "note": found.also_differ_in(columns),
    }  # fmt: skip


def line_of(place: int) -> dict[str, str] | None:
    """The colour and dashes of a run's curves; None beyond those that can be told apart."""
    if place >= DRAWN:
        return None
    return {"color": list(COLORS)[place % len(COLORS)], "dashes": _DASHES[place // len(COLORS)]}


def curves(found: Comparison) -> list[tuple[Markup, str]]:
    """Plots with the curves of the first runs, the best on top, and their captions."""
    plots = [
        (_overlay(found, "Loss", loss_curve), "Running means."),
        (
            _overlay(found, "Loss over time", _loss_over_time, unit="minutes"),
            "Since each run's first start; running means.",
        ),
        (_overlay(found, "Loss on the evaluation data", _evaluations("eval_loss")), ""),
        (_overlay(found, "Tokens per second", _throughput), "Real tokens only; padding is not counted."),
    ]
    if found.metric and found.metric.startswith("eval_") and found.metric != "eval_loss":
        plots.insert(0, (_overlay(found, found.metric_name, _evaluations(found.metric), low=None), ""))
    return [(svg, caption) for svg, caption in plots if svg is not None]


def loss_curve(one: RunSummary) -> Points:
    steps, losses = points(one.run.steps, "loss")
    return steps, smooth(losses)


def _loss_over_time(one: RunSummary) -> Points:
    timed = [
        entry for entry in one.run.steps if number(entry, "time") is not None and number(entry, "loss") is not None
    ]
    began = one.run.first_time
    if began is None:
        return [], []
    return [max(entry["time"] - began, 0.0) / 60 for entry in timed], smooth([entry["loss"] for entry in timed])


def _evaluations(metric: str) -> Callable[[RunSummary], Points]:
    return lambda one: points(one.run.evaluations, metric)


def _throughput(one: RunSummary) -> Points:
    return points(one.run.steps, "tokens_per_second")


def _overlay(
    found: Comparison, title: str, read: Callable[[RunSummary], Points], *, unit: str = "step", low: float | None = 0.0
) -> Markup | None:
    """The curves that `read` takes from the runs, over each other; None if no run has one."""
    return draw_over_each_other([read(one) for one in found.runs[:DRAWN]], title, unit=unit, low=low)


def draw_over_each_other(
    every: Sequence[Points], title: str, *, unit: str = "step", low: float | None = 0.0, what: str = "runs",
    ticks: Sequence[float] | None = None,
) -> Markup | None:  # fmt: skip
    """Curves over each other, the first on top. Those that cannot be told apart are grey and lie behind the others.

    `ticks` are those of the horizontal axis, from its first to its last value; None: as the curves need them.
    """
    shown = [(i, curve) for i, curve in enumerate(every) if curve[0]]
    if not shown:
        return None
    with matplotlib.rc_context(STYLE):
        figure, (axis,) = new_figure(2.9)
        for i, (steps, values) in reversed(shown):
            marker = "o" if len(steps) < 12 else None
            line: Any = line_of(i)
            if line is None:
                axis.plot(steps, values, color=MUTED, alpha=0.35, linewidth=1, marker=marker, markersize=2.5)
                continue
            dashes: Any = (0, tuple(float(one) / 2 for one in line["dashes"].split())) if line["dashes"] else "-"
            axis.plot(
                steps, values, color=COLORS[line["color"]], linestyle=dashes, linewidth=1.6, marker=marker, markersize=4
            )
        style_axes(axis, title[:1].upper() + title[1:])
        axis.set_xlabel(unit, fontsize=10)
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
        if low is not None:
            axis.set_ylim(bottom=low)
        if ticks is not None:
            axis.set_xticks(ticks)
            margin = 0.02 * (ticks[-1] - ticks[0])  # so that markers at the ends are whole
            axis.set_xlim(ticks[0] - margin, ticks[-1] + margin)
        return as_svg(figure, f"{title} of {len(shown)} {what}")
