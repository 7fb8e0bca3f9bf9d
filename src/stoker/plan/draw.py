"""Plots the plan: efficiency and time per epoch by number of nodes, in the format of the file's suffix."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from stoker.plan.advice import Row

__all__ = ["draw"]

_COLOURS = {"DDP fp32": "#495057", "DDP bf16": "#f08c00", "local SGD": "#d9480f"}


def draw(rows: Sequence[Row], title: str, path: Path) -> None:
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullLocator

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "stoker", "font.size": 10}):
        figure = Figure(figsize=(8, 3.6), layout="constrained")
        left, right = figure.subplots(1, 2)
        nodes = [row.plain.nodes for row in rows]
        for name, values in (
            ("DDP fp32", [row.plain for row in rows]),
            ("DDP bf16", [row.bf16 for row in rows]),
            ("local SGD", [row.local for row in rows]),
        ):
            left.plot(nodes, [100 * one.efficiency for one in values], color=_COLOURS[name], marker="o", label=name)
        left.set_ylim(0, 105)
        left.set_ylabel("% of ideal throughput")
        left.set_title("Efficiency", loc="left")
        left.legend(frameon=False)
        right.plot(nodes, [row.epoch / 60 for row in rows], color="#d9480f", marker="o", label="as advised")
        right.plot(nodes, [rows[0].epoch * nodes[0] / n / 60 for n in nodes], color="#adb5bd", label="ideal")
        right.set_yscale("log")
        right.set_title("Minutes per epoch", loc="left")
        right.legend(frameon=False)
        for axis in (left, right):
            axis.set_xscale("log", base=2)
            axis.set_xticks(nodes)
            axis.xaxis.set_minor_locator(NullLocator())
            axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
            axis.set_xlabel("nodes")
            axis.spines[["top", "right"]].set_visible(False)
        figure.suptitle(title, fontsize=11)
        figure.savefig(path, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
