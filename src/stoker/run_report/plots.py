"""The plots of the report, as SVG that uses the page's colours and fonts and so follows light and dark mode.

matplotlib draws with placeholder colours, which `_svg` replaces with CSS variables.
"""

from __future__ import annotations

import io
import itertools
import re
import warnings
from collections.abc import Sequence
from typing import Any

import matplotlib
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from stoker.run_report.log import Run, number

__all__ = [
    "lengths_plot", "loss_plot", "phases_plot", "scores_plot", "speed_plot", "throughput_plot", "waits_of", "waits_plot",
]  # fmt: skip

# Placeholder colours that no plot has by chance, and the CSS variable that replaces each.
_INK, _MUTED, _GRID, _ONE, _TWO, _THREE, _FOUR, _FIVE = (f"#0a0b{n:02x}" for n in range(1, 9))
_VARIABLES = dict(
    zip(
        (_INK, _MUTED, _GRID, _ONE, _TWO, _THREE, _FOUR, _FIVE),
        ("ink", "muted", "grid", "one", "two", "three", "four", "five"),
        strict=True,
    )
)
_STYLE: Any = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # a dollar sign in a name must not start a formula
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.edgecolor": _GRID,
    "axes.labelcolor": _MUTED,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": _GRID,
    "grid.linewidth": 0.8,
    "text.color": _INK,
    "xtick.color": _MUTED,
    "ytick.color": _MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "lines.linewidth": 2,
    "lines.solid_capstyle": "round",
    "figure.facecolor": "none",
    "axes.facecolor": "none",
}
_WIDTH = 4.6  # inches, 331 points: about a phone's width, so that text is not scaled down there
_NUMBERS = itertools.count()


def _figure(height: float, panels: Sequence[float] = (1.0,)) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    axes = figure.subplots(len(panels), 1, sharex=True, height_ratios=list(panels), squeeze=False)
    return figure, [row[0] for row in axes]


def _svg(figure: Figure, label: str) -> Markup:
    """The figure as an <svg> element whose ids are unique on the page."""
    file = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": label}), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # labels too long for the plot, missing glyphs: the browser shows them
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = file.getvalue()
    text = text[text.index("<svg") :]
    number = next(_NUMBERS)
    text = re.sub(r'\bid="([^"]+)"', rf'id="p{number}-\1"', text)
    text = re.sub(r"(url\(#|href=\"#)", rf"\1p{number}-", text)
    text = re.sub(r"font: ([\d.]+)px [^;\"]+", r"font-size: \1px; font-family: inherit", text)
    for placeholder, variable in _VARIABLES.items():
        text = text.replace(placeholder, f"var(--{variable})")
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    head, _, body = text.partition(">")
    head = re.sub(r' (width|height)="[^"]*"', "", head)
    # matplotlib has escaped the texts in the plot
    return Markup('{} role="img" aria-label="{}">{}').format(Markup(head), label, Markup(body))


def _points(entries: Sequence[dict[str, Any]], name: str) -> tuple[list[float], list[float]]:
    found = [(float(one["step"]), value) for one in entries if (value := number(one, name)) is not None]
    return [step for step, _ in found], [value for _, value in found]


def _smooth(values: Sequence[float], weight: float = 0.85) -> list[float]:
    smooth, mean, total = [], 0.0, 0.0
    for value in values:
        mean, total = weight * mean + value, weight * total + 1.0
        smooth.append(mean / total)
    return smooth


def _style_axes(axis: Axes, title: str, run: Run | None = None, last: bool = True) -> None:
    axis.set_title(title, loc="left", fontsize=11, color=_MUTED, pad=8)
    axis.margins(x=0.02)
    axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axis.yaxis.set_major_locator(MaxNLocator(4))
    if last:
        axis.set_xlabel("step", fontsize=10)
    for step in run.resumed_at if run else ():
        axis.axvline(step, color=_MUTED, linewidth=1, linestyle=(0, (2, 3)))


def loss_plot(run: Run) -> Markup | None:
    steps, losses = _points(run.steps, "loss")
    if not steps:
        return None
    with matplotlib.rc_context(_STYLE):
        figure, (top, bottom) = _figure(3.5, (3, 1))
        if len(steps) > 12:
            top.plot(steps, losses, color=_ONE, linewidth=1, alpha=0.35)
            top.plot(steps, _smooth(losses), color=_ONE)
        else:
            top.plot(steps, losses, color=_ONE, marker="o", markersize=4)
        _style_axes(top, "Loss", run, last=False)
        top.set_ylim(bottom=0)
        bottom.plot(*_points(run.steps, "learning_rate"), color=_TWO)
        bottom.set_ylim(bottom=0)
        bottom.yaxis.set_major_formatter(
            FuncFormatter(lambda value, _: f"{value:.0e}".replace("e-0", "e-") if value else "0")
        )
        _style_axes(bottom, "Learning rate", run)
        bottom.yaxis.set_major_locator(MaxNLocator(2))
        return _svg(figure, f"Loss over {int(steps[-1])} steps, ending at {losses[-1]:.3g}, and the learning rate")


_SCORES = (
    ("eval_f1", "F1", _ONE), ("eval_exact_match", "EM", _TWO), ("eval_exact", "EM", _TWO),
    ("eval_accuracy", "accuracy", _THREE), ("eval_matthews_correlation", "Matthews", _FOUR), ("eval_pearson", "Pearson", _FOUR),
    ("eval_spearmanr", "Spearman", _FIVE), ("eval_spearman_cosine", "Spearman", _ONE), ("eval_cosine_ndcg@10", "NDCG@10", _ONE),
    ("eval_cosine_recall@10", "recall@10", _TWO), ("eval_cosine_mrr@10", "MRR@10", _FOUR),
    ("eval_cosine_accuracy", "accuracy", _THREE), ("eval_masked_accuracy", "masked tokens right", _ONE),
    ("eval_ndcg@10", "NDCG@10", _ONE), ("eval_mrr@10", "MRR@10", _TWO), ("eval_map", "MAP", _FOUR),
    ("eval_average_precision", "AP", _FOUR), ("eval_spearman", "Spearman", _ONE), ("eval_f1_macro", "macro F1", _ONE),
    ("eval_f1_micro", "accuracy", _THREE), ("eval_form", "form", _TWO), ("eval_right", "right", _ONE),
)  # fmt: skip


def scores_plot(run: Run) -> Markup | None:
    found = [(label, color, *_points(run.evaluations, name)) for name, label, color in _SCORES]
    found = [one for one in found if one[2]]
    if not found or max(len(one[2]) for one in found) < 2:  # a single value is shown in its tile
        return None
    with matplotlib.rc_context(_STYLE):
        figure, (axis,) = _figure(2.7)
        top = max(max(values) for _, _, _, values in found)
        top = 100.0 if top > 1.5 else 1.0
        lowest = top * 1.2
        for label, color, steps, values in sorted(found, key=lambda one: -one[3][-1]):
            axis.plot(steps, values, color=color, marker="o", markersize=5)
            lowest = min(
                values[-1], lowest - 0.1 * top
            )  # labels of curves that end together are placed below each other
            axis.annotate(f"{label} {values[-1]:.3g}", (steps[-1], lowest), xytext=(8, 0),
                          textcoords="offset points", va="center", color=color, annotation_clip=False)  # fmt: skip
        axis.set_ylim(0, top)
        _style_axes(axis, "Evaluation", run)
        axis.margins(x=0.04)
        summary = ", ".join(f"{label} {values[-1]:.3g}" for label, _, _, values in found)
        return _svg(figure, f"Scores over time, at the end {summary}")


def throughput_plot(run: Run) -> Markup | None:
    steps, tokens = _points(run.steps, "tokens_per_second")
    if not steps:
        return None
    shares = _points(run.steps, "share_of_peak")
    with matplotlib.rc_context(_STYLE):
        figure, axes = _figure(3.5 if shares[0] else 2.6, (1, 1) if shares[0] else (1,))
        axes[0].plot(steps, tokens, color=_THREE)
        axes[0].set_ylim(bottom=0)
        axes[0].yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        _style_axes(axes[0], "Tokens per second", run, last=not shares[0])
        if shares[0]:
            axes[1].plot(shares[0], [100 * value for value in shares[1]], color=_FOUR)
            axes[1].set_ylim(0, max(100, *(110 * value for value in shares[1])))
            axes[1].yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}%"))
            _style_axes(axes[1], "Share of the machine's measured peak", run)
        middle = sorted(tokens)[len(tokens) // 2]
        return _svg(figure, f"Throughput, {middle:,.0f} real tokens per second at the median")


def lengths_plot(run: Run) -> Markup | None:
    entry = run.others.get("lengths")
    if not entry or not any(entry["counts"]):
        return None
    edges, counts, mean = entry["edges"], entry["counts"], entry["mean"]
    padded = entry.get("padded_to") or entry["longest"]
    if mean > 0.995 * padded:  # rows of full length, as for masked LM
        return None
    with matplotlib.rc_context(_STYLE):
        figure, (axis,) = _figure(2.7)
        axis.bar(
            edges[:-1], counts, width=[0.9 * (b - a) for a, b in itertools.pairwise(edges)], align="edge", color=_ONE
        )
        axis.axvline(mean, color=_INK, linewidth=1.2)
        axis.axvspan(mean, padded, color=_TWO, alpha=0.13, linewidth=0)
        height = max(counts)
        axis.set_ylim(0, height * 1.3)
        axis.annotate(f"mean {mean:.0f}", (mean, height * 1.18), xytext=(-5, 0), textcoords="offset points", ha="right")
        axis.annotate(f"padding to {padded}", (padded, height * 1.18), xytext=(-5, 0), textcoords="offset points",
                      ha="right", color=_TWO)  # fmt: skip
        _style_axes(axis, "Rows by length")
        axis.set_xlabel("tokens", fontsize=10)
        share = 1 - mean / padded
        return _svg(
            figure, f"Lengths of {entry['rows']} rows, {mean:.0f} tokens on average; {share:.0%} would be padding"
        )


_PHASES = (("forward", _ONE), ("backward", _TWO), ("optimizer", _THREE), ("data", _FOUR), ("rest", _FIVE))


def phases_plot(run: Run) -> Markup | None:
    totals = {name: 0.0 for name, _ in _PHASES}
    for one in run.steps:
        for name in totals:
            totals[name] += max(number(one.get("phases") or {}, name) or 0.0, 0.0)
    whole = sum(totals.values())
    if not whole:
        return None
    with matplotlib.rc_context(_STYLE):
        figure, (axis,) = _figure(2.3)
        names = [name for name, _ in _PHASES]
        for row, (name, color) in enumerate(_PHASES):
            share = 100 * totals[name] / whole
            axis.barh(row, share, height=0.62, color=color)
            axis.annotate(f"{share:.1f}%", (share, row), xytext=(5, 0), textcoords="offset points", va="center")
        _name_bars(axis, names, "Where a step's time went")
        axis.set_xlim(0, 112 * max(totals.values()) / whole)
        summary = ", ".join(f"{name} {100 * totals[name] / whole:.0f}%" for name in names)
        return _svg(figure, f"Time of a step by phase: {summary}")


_SIDES_SHOWN, _NAME_SHOWN = 8, 24


def _one_line(name: str) -> str:
    """A name shortened for a plot, without characters that XML does not allow."""
    shown = "".join(letter if letter.isprintable() else " " for letter in name)
    return shown if len(shown) <= _NAME_SHOWN else shown[: _NAME_SHOWN - 3] + "..."


def speed_plot(run: Run) -> Markup | None:
    entry = run.others.get("speed")
    if not entry or not entry["sides"]:
        return None
    sides: dict[str, list[float]] = {
        _one_line(name): values for name, values in list(entry["sides"].items())[:_SIDES_SHOWN]
    }
    with matplotlib.rc_context(_STYLE):
        figure, (axis,) = _figure(0.75 + 0.55 * len(sides))
        colors = {name: _ONE if "stoker" in name.lower() else _MUTED for name in sides}
        middles = {name: sorted(values)[len(values) // 2] for name, values in sides.items()}
        for row, (name, values) in enumerate(sides.items()):
            axis.barh(row, middles[name], height=0.55, color=colors[name], alpha=0.85)
            axis.plot(values, [row] * len(values), linestyle="", marker="|", markersize=9, color=_INK, alpha=0.6)
            axis.annotate(
                f"{middles[name]:.2f} s", (max(values), row), xytext=(7, 0), textcoords="offset points", va="center"
            )
        _name_bars(axis, list(sides), "Seconds per training step")
        axis.set_xlim(0, 1.22 * max(max(values) for values in sides.values()))
        summary = ", ".join(f"{name} {middles[name]:.2f} s" for name in sides)
        return _svg(figure, f"Seconds per step, medians: {summary}")


def _name_bars(axis: Axes, names: list[str], title: str) -> None:
    """Labels horizontal bars, the first on top; their values are annotated, so there is no scale."""
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    axis.set_xticks([])
    axis.grid(False)
    axis.spines["bottom"].set_visible(False)
    axis.set_title(title, loc="left", fontsize=11, color=_MUTED, pad=8)


def waits_of(run: Run) -> tuple[list[list[float]], list[int]]:
    """Seconds that each rank waited, by step, and how often each rank was the last to arrive.

    Steps in which nobody waited are skipped: between two averages of local SGD, ranks do not synchronize.
    """
    rows = [row for entry in run.waits for row in entry.get("rows") or () if len(row) > 3 and any(row[2:])]
    ranks = max((len(row) - 2 for row in rows), default=0)
    rows = [row for row in rows if len(row) - 2 == ranks]  # if the number of ranks changed, use the larger job
    return rows, [sum(row[1] == rank for row in rows) for rank in range(ranks)]


_RANKS_SHOWN = 16


def waits_plot(run: Run) -> Markup | None:
    rows, last_count = waits_of(run)
    if not rows:
        return None
    # With many ranks, those that were last most often.
    shown = sorted(sorted(range(len(last_count)), key=lambda rank: -last_count[rank])[:_RANKS_SHOWN])
    with matplotlib.rc_context(_STYLE):
        figure, (axis,) = _figure(0.9 + 0.42 * len(shown))
        for row, rank in enumerate(shown):
            share = 100 * last_count[rank] / len(rows)
            axis.barh(row, share, height=0.6, color=_TWO)
            mean = 1000 * sum(one[2 + rank] for one in rows) / len(rows)
            axis.annotate(f"{share:.0f}%, waited {mean:.0f} ms itself", (share, row), xytext=(5, 0),
                          textcoords="offset points", va="center", annotation_clip=False)  # fmt: skip
        _name_bars(axis, [f"rank {rank}" for rank in shown], "Steps in which others waited for this rank")
        axis.set_xlim(0, 220)
        summary = ", ".join(f"rank {rank} in {last_count[rank]} of {len(rows)} steps" for rank in shown)
        return _svg(figure, f"Ranks that others waited for: {summary}")
