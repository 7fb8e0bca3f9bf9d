"""The plots of the report: one function each, which returns None if the log has nothing for it."""

from __future__ import annotations

import itertools

import matplotlib
from markupsafe import Markup
from matplotlib.ticker import FuncFormatter, MaxNLocator

from stoker.run_report.drawing import (
    COLORS,
    FIVE,
    FOUR,
    INK,
    MUTED,
    ONE,
    STYLE,
    THREE,
    TWO,
    as_svg,
    name_bars,
    new_figure,
    one_line,
    style_axes,
)
from stoker.run_report.figures import SCORES, phase_totals, points, smooth, waits_of
from stoker.run_report.log import Run

__all__ = [
    "lengths_plot", "loss_plot", "phases_plot", "scores_plot", "speed_plot", "throughput_plot", "waits_plot",
]  # fmt: skip


def loss_plot(run: Run) -> Markup | None:
    steps, losses = points(run.steps, "loss")
    if not steps:
        return None
    with matplotlib.rc_context(STYLE):
        figure, (top, bottom) = new_figure(3.5, (3, 1))
        if len(steps) > 12:
            top.plot(steps, losses, color=ONE, linewidth=1, alpha=0.35)
            top.plot(steps, smooth(losses), color=ONE)
        else:
            top.plot(steps, losses, color=ONE, marker="o", markersize=4)
        style_axes(top, "Loss", run, last=False)
        top.set_ylim(bottom=0)
        bottom.plot(*points(run.steps, "learning_rate"), color=TWO)
        bottom.set_ylim(bottom=0)
        bottom.yaxis.set_major_formatter(
            FuncFormatter(lambda value, _: f"{value:.0e}".replace("e-0", "e-") if value else "0")
        )
        style_axes(bottom, "Learning rate", run)
        bottom.yaxis.set_major_locator(MaxNLocator(2))
        return as_svg(figure, f"Loss over {int(steps[-1])} steps, ending at {losses[-1]:.3g}, and the learning rate")


def scores_plot(run: Run) -> Markup | None:
    found = [(label, COLORS[color], *points(run.evaluations, f"eval_{name}")) for name, label, color in SCORES]
    found = [one for one in found if one[2]]
    if not found or max(len(one[2]) for one in found) < 2:  # a single value is shown in its tile
        return None
    with matplotlib.rc_context(STYLE):
        figure, (axis,) = new_figure(2.7)
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
        style_axes(axis, "Evaluation", run)
        axis.margins(x=0.04)
        summary = ", ".join(f"{label} {values[-1]:.3g}" for label, _, _, values in found)
        return as_svg(figure, f"Scores over time, at the end {summary}")


def throughput_plot(run: Run) -> Markup | None:
    steps, tokens = points(run.steps, "tokens_per_second")
    if not steps:
        return None
    shares = points(run.steps, "share_of_peak")
    with matplotlib.rc_context(STYLE):
        figure, axes = new_figure(3.5 if shares[0] else 2.6, (1, 1) if shares[0] else (1,))
        axes[0].plot(steps, tokens, color=THREE)
        axes[0].set_ylim(bottom=0)
        axes[0].yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        style_axes(axes[0], "Tokens per second", run, last=not shares[0])
        if shares[0]:
            axes[1].plot(shares[0], [100 * value for value in shares[1]], color=FOUR)
            axes[1].set_ylim(0, max(100, *(110 * value for value in shares[1])))
            axes[1].yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}%"))
            style_axes(axes[1], "Share of the machine's measured peak", run)
        middle = sorted(tokens)[len(tokens) // 2]
        return as_svg(figure, f"Throughput, {middle:,.0f} real tokens per second at the median")


def lengths_plot(run: Run) -> Markup | None:
    entry = run.others.get("lengths")
    if not entry or not any(entry["counts"]):
        return None
    edges, counts, mean = entry["edges"], entry["counts"], entry["mean"]
    padded = entry.get("padded_to") or entry["longest"]
    if mean > 0.995 * padded:  # rows of full length, as for masked LM
        return None
    with matplotlib.rc_context(STYLE):
        figure, (axis,) = new_figure(2.7)
        axis.bar(
            edges[:-1], counts, width=[0.9 * (b - a) for a, b in itertools.pairwise(edges)], align="edge", color=ONE
        )
        axis.axvline(mean, ymax=0.84, color=INK, linewidth=1.2)  # up to the labels
        axis.axvspan(mean, padded, color=TWO, alpha=0.13, linewidth=0)
        height = max(counts)
        axis.set_ylim(0, height * 1.42)
        axis.annotate(f"mean {mean:.0f}", (mean, height * 1.1), xytext=(-5, 0), textcoords="offset points", ha="right")
        axis.annotate(f"padding to {padded}", (padded, height * 1.28), xytext=(-5, 0), textcoords="offset points",
                      ha="right", color=TWO)  # fmt: skip
        style_axes(axis, "Rows by length")
        axis.set_xlabel("tokens", fontsize=10)
        share = 1 - mean / padded
        return as_svg(
            figure, f"Lengths of {entry['rows']} rows, {mean:.0f} tokens on average; {share:.0%} would be padding"
        )


def phases_plot(run: Run) -> Markup | None:
    totals = phase_totals(run)
    whole = sum(totals.values())
    if not whole:
        return None
    with matplotlib.rc_context(STYLE):
        figure, (axis,) = new_figure(2.3)
        names = list(totals)
        for row, (name, color) in enumerate(zip(names, (ONE, TWO, THREE, FOUR, FIVE), strict=True)):
            share = 100 * totals[name] / whole
            axis.barh(row, share, height=0.62, color=color)
            axis.annotate(f"{share:.1f}%", (share, row), xytext=(5, 0), textcoords="offset points", va="center")
        name_bars(axis, names, "Where a step's time went")
        axis.set_xlim(0, 112 * max(totals.values()) / whole)
        summary = ", ".join(f"{name} {100 * totals[name] / whole:.0f}%" for name in names)
        return as_svg(figure, f"Time of a step by phase: {summary}")


_SIDES_SHOWN = 8


def speed_plot(run: Run) -> Markup | None:
    entry = run.others.get("speed")
    if not entry or not entry["sides"]:
        return None
    sides: dict[str, list[float]] = {
        one_line(name): values for name, values in list(entry["sides"].items())[:_SIDES_SHOWN]
    }
    with matplotlib.rc_context(STYLE):
        figure, (axis,) = new_figure(0.75 + 0.55 * len(sides))
        colors = {name: ONE if "stoker" in name.lower() else MUTED for name in sides}
        middles = {name: sorted(values)[len(values) // 2] for name, values in sides.items()}
        for row, (name, values) in enumerate(sides.items()):
            axis.barh(row, middles[name], height=0.55, color=colors[name], alpha=0.85)
            axis.plot(values, [row] * len(values), linestyle="", marker="|", markersize=9, color=INK, alpha=0.6)
            axis.annotate(
                f"{middles[name]:.2f} s", (max(values), row), xytext=(7, 0), textcoords="offset points", va="center"
            )
        name_bars(axis, list(sides), "Seconds per training step")
        axis.set_xlim(0, 1.22 * max(max(values) for values in sides.values()))
        summary = ", ".join(f"{name} {middles[name]:.2f} s" for name in sides)
        return as_svg(figure, f"Seconds per step, medians: {summary}")


_RANKS_SHOWN = 16


def waits_plot(run: Run) -> Markup | None:
    rows, last_count = waits_of(run)
    if not rows:
        return None
    # With many ranks, those that were last most often.
    shown = sorted(sorted(range(len(last_count)), key=lambda rank: -last_count[rank])[:_RANKS_SHOWN])
    with matplotlib.rc_context(STYLE):
        figure, (axis,) = new_figure(0.9 + 0.42 * len(shown))
        for row, rank in enumerate(shown):
            share = 100 * last_count[rank] / len(rows)
            axis.barh(row, share, height=0.6, color=TWO)
            mean = 1000 * sum(one[2 + rank] for one in rows) / len(rows)
            axis.annotate(f"{share:.0f}%, waited {mean:.0f} ms itself", (share, row), xytext=(5, 0),
                          textcoords="offset points", va="center", annotation_clip=False)  # fmt: skip
        name_bars(axis, [f"rank {rank}" for rank in shown], "Steps in which others waited for this rank")
        axis.set_xlim(0, 220)
        summary = ", ".join(f"rank {rank} in {last_count[rank]} of {len(rows)} steps" for rank in shown)
        return as_svg(figure, f"Ranks that others waited for: {summary}")
