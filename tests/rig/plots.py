"""Draws the plots of report pages only once: drawing takes longer than training a tiny model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from markupsafe import Markup

from stoker.run_report import page
from stoker.run_report.log import Run

PLOTS = ("scores_plot", "loss_plot", "throughput_plot", "lengths_plot", "phases_plot", "waits_plot", "speed_plot")
_drawn: set[str] = set()


def draw_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kind of plot is drawn for the first run of this process that shows it; later pages get an empty one."""
    for name in PLOTS:
        monkeypatch.setattr(page, name, _once(name, getattr(page, name)))


def _once(name: str, draw: Callable[[Run], Markup | None]) -> Callable[[Run], Markup | None]:
    def plot(run: Run) -> Markup | None:
        if name in _drawn:
            return Markup("<svg></svg>")
        svg = draw(run)
        if svg is not None:
            _drawn.add(name)
        return svg

    return plot
