"""How a comparison of runs is written, in the terminal and on the page."""

from __future__ import annotations

from typing import Any

from stoker.english import duration
from stoker.run_report.compare import RunSummary

__all__ = ["figures", "setting"]

_SHOWN = 48


def figures(one: RunSummary, metric: str | None) -> tuple[str, str, str]:
    """The best value with its step, tokens per second, and the duration."""
    best = one.best(metric) if metric else None
    shown = "-"
    if best is not None:
        shown = duration(best.value) if metric == "duration" else f"{best.value:,.4g}"
        if best.step is not None and len(one.run.evaluations) > 1 and metric != "loss":
            shown += f" (step {best.step:,})"
    speed = one.tokens_per_second
    return shown, "-" if speed is None else f"{speed:,.0f}", duration(one.run.seconds)


def setting(value: Any) -> str:
    """A value as it would be typed; of older logs, those that were not given are not known."""
    if value is None:
        return "-"
    shown = (
        " ".join(map(str, value))
        if isinstance(value, list)
        else f"{value:g}"
        if isinstance(value, float)
        else str(value)
    )
    shown = "".join(letter if letter.isprintable() else "?" for letter in shown)
    return shown if len(shown) <= _SHOWN else shown[: _SHOWN - 3] + "..."
