"""How plots are drawn: by matplotlib, as SVG that uses the page's colours and fonts and so follows light and dark mode.

matplotlib draws with placeholder colours, which `as_svg` replaces with CSS variables.
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
from matplotlib.ticker import MaxNLocator

from stoker.run_report.log import Run

__all__ = [
    "COLORS", "FIVE", "FOUR", "GRID", "INK", "MUTED", "ONE", "STYLE", "THREE", "TWO", "as_svg", "name_bars",
    "new_figure", "one_line", "style_axes",
]  # fmt: skip

# Placeholder colours that no plot has by chance, and the CSS variable that replaces each.
INK, MUTED, GRID, ONE, TWO, THREE, FOUR, FIVE = (f"#0a0b{n:02x}" for n in range(1, 9))
_VARIABLES = dict(
    zip(
        (INK, MUTED, GRID, ONE, TWO, THREE, FOUR, FIVE),
        ("ink", "muted", "grid", "one", "two", "three", "four", "five"),
        strict=True,
    )
)
COLORS = {"one": ONE, "two": TWO, "three": THREE, "four": FOUR, "five": FIVE}
"""The colours of curves, by the names of their CSS variables."""
STYLE: Any = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # a dollar sign in a name must not start a formula
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "lines.linewidth": 2,
    "lines.solid_capstyle": "round",
    "figure.facecolor": "none",
    "axes.facecolor": "none",
}
_WIDTH = 4.6  # inches, 331 points: about a phone's width, so that text is not scaled down there
_NUMBERS = itertools.count()
_NAME_SHOWN = 24


def new_figure(height: float, panels: Sequence[float] = (1.0,)) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    axes = figure.subplots(len(panels), 1, sharex=True, height_ratios=list(panels), squeeze=False)
    return figure, [row[0] for row in axes]


def as_svg(figure: Figure, label: str) -> Markup:
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


def style_axes(axis: Axes, title: str, run: Run | None = None, last: bool = True) -> None:
    axis.set_title(title, loc="left", fontsize=11, color=MUTED, pad=8)
    axis.margins(x=0.02)
    axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axis.yaxis.set_major_locator(MaxNLocator(4))
    if last:
        axis.set_xlabel("step", fontsize=10)
    for step in run.resumed_at if run else ():
        axis.axvline(step, color=MUTED, linewidth=1, linestyle=(0, (2, 3)))


def name_bars(axis: Axes, names: list[str], title: str) -> None:
    """Labels horizontal bars, the first on top; their values are annotated, so there is no scale."""
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    axis.set_xticks([])
    axis.grid(False)
    axis.spines["bottom"].set_visible(False)
    axis.set_title(title, loc="left", fontsize=11, color=MUTED, pad=8)


def one_line(name: str) -> str:
    """A name shortened for a plot, without characters that XML does not allow."""
    shown = "".join(letter if letter.isprintable() else " " for letter in name)
    return shown if len(shown) <= _NAME_SHOWN else shown[: _NAME_SHOWN - 3] + "..."
