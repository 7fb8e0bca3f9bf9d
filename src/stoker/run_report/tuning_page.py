"""The page of a search: its trials in a table and as curves, how the score depends on each option, and the best command."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import matplotlib
from markupsafe import Markup
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from stoker.english import counted, duration
from stoker.run_report.compare import RunSummary, summary_of
from stoker.run_report.compare_texts import setting
from stoker.run_report.drawing import MUTED, ONE, STYLE, THREE, as_svg, name_bars, new_figure, one_line, style_axes
from stoker.run_report.overlay import DRAWN, draw_over_each_other, line_of, loss_curve
from stoker.run_report.templates import template
from stoker.run_report.tuning import TrialRow, Tuning, short_name

__all__ = ["render_tuning"]


def render_tuning(found: Tuning) -> str:
    runs = [_run(row) for row in found.rows]
    names = [name for name, _, _ in found.parameters]
    rows = [
        {"number": row.number + 1, "name": "as given" if row.given else "", "label": row.state, "tone": row.tone,
         "line": line_of(place), "figures": _figures(row, run),
         "settings": [setting(row.values.get(name)) if name in row.values else "-" for name in names]}
        for place, (row, run) in enumerate(zip(found.rows, runs, strict=True))
    ]  # fmt: skip
    best = found.best
    return template("tuning.html.jinja").render(
        title=f"{found.title}, {counted(len(rows), 'trial')}", status=_status(found), tiles=_tiles(found, runs),
        best=[(name, setting(value)) for name, value in best.values.items()] if best else None,
        train=found.train, train_in_full=found.train_in_full, again=found.again, run_word="trial",
        metric=found.metric_name, settings=names, rows=rows, table_note=_table_note(found), plots=_plots(found, runs),
        notes=[(f"Trial {row.number + 1}, {row.state}", row.reason) for row in found.rows if row.reason],
        searched=[*((name, values) for name, values, _ in found.parameters),
                  ("best is", f"the {'lowest' if found.lower else 'highest'} {found.metric_name} at the end of training")],
        version=found.version,
    )  # fmt: skip


def _run(row: TrialRow) -> RunSummary | None:
    """The run log of a trial; None if it was not begun."""
    try:
        return summary_of(row.folder, row.folder.name)
    except OSError:
        return None


def _figures(row: TrialRow, run: RunSummary | None) -> tuple[str, str, str]:
    score = "-" if row.score is None else f"{row.score:,.4g}"
    if row.score is not None and row.state != "finished" and row.curve:
        score += f" (at {row.curve[-1][0]:.0f}%)"
    if run is None:
        return score, "-", "-"
    speed = run.tokens_per_second
    return score, "-" if speed is None else f"{speed:,.0f}", duration(run.run.seconds)


def _status(found: Tuning) -> dict[str, str]:
    ended = sum(row.state not in ("running", "queued", "killed") for row in found.rows)
    details = f"{ended} of {counted(found.wanted, 'trial')} done, by {found.metric_name}"
    if found.running:
        return {"tone": "busy", "label": "running", "details": details}
    complete = ended >= found.wanted
    return {"tone": "good" if complete else "bad", "label": "finished" if complete else "stopped", "details": details}


def _tiles(found: Tuning, runs: Sequence[RunSummary | None]) -> list[tuple[str, str]]:
    tiles = []
    best, first = found.best, found.first
    if best is not None:
        tiles.append((f"{best.score:,.4g}", f"best {found.metric_name}, in trial {best.number + 1}"))
    if first is not None and first is not best:
        tiles.append((f"{first.score:,.4g}", "with the options of the command"))
    tiles.append((str(len(found.finished)), "trials trained to the end"))
    if pruned := sum(row.state == "pruned" for row in found.rows):
        tiles.append((str(pruned), "stopped early"))
    tiles.append((duration(sum(run.run.seconds for run in runs if run is not None)), "of training"))
    return tiles


def _table_note(found: Tuning) -> str:
    note = "The best first. A pruned trial was worse than the median of the others at the same part of its training."
    more = f" The first {DRAWN} have colours; the curves of the others are grey."
    return note + (more if len(found.rows) > DRAWN else "")


def _plots(found: Tuning, runs: Sequence[RunSummary | None]) -> list[tuple[Markup, str]]:
    scores = [([x for x, _ in row.curve], [y for _, y in row.curve]) for row in found.rows]
    losses = [loss_curve(run) if run is not None else ([], []) for run in runs]
    plots = [
        (
            draw_over_each_other(
                scores, found.metric_name, unit="% of training", low=None, what="trials", ticks=(0, 25, 50, 75, 100)
            ),
            "",
        ),
        (draw_over_each_other(losses, "Loss in training", what="trials"), "Running means."),
        (_history(found), "The line is the best so far."),
        *((_slice(found, name, log, chosen="|" in text), "") for name, text, log in found.parameters),
        (
            _importance(found),
            "What tells the better trials from the rest, estimated by PED-ANOVA.",
        ),
    ]
    return [(svg, caption) for svg, caption in plots if svg is not None]


def _history(found: Tuning) -> Markup | None:
    """The score of each trial in the order of time."""
    done = sorted(found.finished, key=lambda row: row.number)
    if not done:
        return None
    scores = [row.score or 0.0 for row in done]
    best = [(min if found.lower else max)(scores[: i + 1]) for i in range(len(scores))]
    with matplotlib.rc_context(STYLE):
        figure, (axis,) = new_figure(2.9)
        numbers = [row.number + 1 for row in done]
        axis.step(numbers, best, where="post", color=THREE, linewidth=1.6)
        axis.plot(numbers, scores, linestyle="", marker="o", markersize=5, color=ONE)
        _style_scores(axis, f"{found.metric_name} by trial", "trial")
        return as_svg(figure, f"{found.metric_name} of {len(done)} trials, the best {best[-1]:.4g}")


def _slice(found: Tuning, name: str, log: bool, chosen: bool) -> Markup | None:
    """The score of each trial by one of its options; `chosen`: from a list, and not from a range."""
    rows = [row for row in found.rows if row.score is not None and name in row.values]
    if not rows:
        return None
    values = [row.values[name] for row in rows]
    numeric = all(isinstance(value, int | float) for value in values)
    distinct = sorted({*values}, key=None if numeric else str)
    words = [str(value) for value in distinct]
    few = len(distinct) <= _TICKS
    if numeric and few and chosen and not log and not _apart(distinct):
        numeric = False  # side by side instead of by size: 4, 8 and 64
    with matplotlib.rc_context(STYLE):
        figure, (axis,) = new_figure(2.9)
        for row, value in reversed([*zip(rows, values, strict=True)]):  # the best on top
            x: Any = value if numeric else words.index(str(value))
            best, finished = row is found.best, row.state == "finished"
            axis.plot(
                [x], [row.score], linestyle="", marker="o", markersize=8 if best else 5,
                color=THREE if best else ONE if finished else MUTED, alpha=1.0 if finished else 0.6,
                markerfacecolor=None if finished else "none",
            )  # fmt: skip
        _style_scores(axis, f"{found.metric_name} by {short_name(name)}", short_name(name))
        axis.margins(x=0.06)
        if log:
            axis.set_xscale("log")
            axis.xaxis.set_major_locator(LogLocator(10, subs=(1.0, 3.0), numticks=8))
            axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.xaxis.set_minor_locator(NullLocator())
            axis.xaxis.set_minor_formatter(NullFormatter())
        elif not numeric:
            axis.set_xticks(range(len(words)), [_short_label(word, len(words)) for word in words])
        elif few and _apart(distinct):
            axis.set_xticks(distinct)
        else:
            axis.xaxis.set_major_locator(MaxNLocator(4))
        return as_svg(figure, f"{found.metric_name} of {len(rows)} trials by {short_name(name)}")


_TICKS = 6
_LABELS = 48
"""Characters of all labels below a plot."""


def _apart(values: Sequence[float]) -> bool:
    """Whether the labels of these values, at their places on an axis, do not overlap."""
    width = values[-1] - values[0]
    needed = max(len(f"{value:g}") for value in values) / _LABELS
    return len(values) == 1 or min(b - a for a, b in pairwise(values)) >= needed * width


def _short_label(word: str, labels: int) -> str:
    shown, most = one_line(word), max(_LABELS // labels, 4)
    return shown if len(shown) <= most else shown[: most - 1] + "…"


def _style_scores(axis: Any, title: str, unit: str) -> None:
    style_axes(axis, title[:1].upper() + title[1:])
    axis.set_xlabel(one_line(unit), fontsize=10)
    axis.yaxis.set_major_locator(MaxNLocator(4))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))


def _importance(found: Tuning) -> Markup | None:
    if not found.importance:
        return None
    shares = sorted(found.importance.items(), key=lambda one: -one[1])
    with matplotlib.rc_context(STYLE):
        figure, (axis,) = new_figure(0.75 + 0.42 * len(shares))
        for row, (_, share) in enumerate(shares):
            axis.barh(row, share, height=0.6, color=ONE)
            axis.annotate(f"{share:.0%}", (share, row), xytext=(5, 0), textcoords="offset points", va="center")
        name_bars(axis, [one_line(short_name(name)) for name, _ in shares], "What matters most")
        axis.set_xlim(0, 1.2 * max(share for _, share in shares) or 1.0)
        summary = ", ".join(f"{name} {share:.0%}" for name, share in shares)
        return as_svg(figure, f"Importance of the options: {summary}")
