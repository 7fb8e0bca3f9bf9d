"""A search of `stoker tune` as its lines and its page show it: the trials, the best first, and how to repeat the best."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stoker.run_report.compare_texts import setting

__all__ = ["TrialRow", "Tuning", "short_name", "short_values"]

_TONES = {"finished": "good", "running": "busy", "queued": "busy", "pruned": "idle", "repeated": "idle"}
_SHORT = {
    "learning_rate": "learning rate", "per_device_train_batch_size": "batch size", "num_train_epochs": "epochs",
    "lora_r": "rank",
}  # fmt: skip


@dataclass(frozen=True)
class TrialRow:
    number: int
    """From 0, as Optuna counts; people see it from 1."""
    folder: Path
    """With its run log, if it was begun."""
    state: str
    """finished, pruned, repeated, diverged, too large, failed, killed, interrupted, running, queued"""
    values: Mapping[str, Any]
    score: float | None
    """The last one that was reported."""
    curve: Sequence[tuple[float, float]] = ()
    """Percent of its training, and the score there."""
    reason: str = ""
    given: bool = False
    """Whether it has the options of the command."""

    @property
    def tone(self) -> str:
        """The class of its label on a page."""
        return _TONES.get(self.state, "bad")


@dataclass(frozen=True)
class Tuning:
    title: str
    metric: str
    lower: bool
    """Whether lower is better."""
    rows: Sequence[TrialRow]
    """The best first."""
    wanted: int
    """The number of trials that were asked for."""
    running: bool
    parameters: Sequence[tuple[str, str, bool]]
    """What was searched: names, values as they were typed, and whether the range is logarithmic."""
    train: str = ""
    """The command that trains the best, from the recipe."""
    train_in_full: str = ""
    """The same with all options."""
    again: str = ""
    """The command that continues the search."""
    importance: Mapping[str, float] = field(default_factory=dict)
    """Shares of 1; empty if too few trials have finished."""
    version: str = ""

    @property
    def finished(self) -> list[TrialRow]:
        return [one for one in self.rows if one.state == "finished"]

    @property
    def best(self) -> TrialRow | None:
        return next(iter(self.finished), None)

    @property
    def first(self) -> TrialRow | None:
        """The trial with the values of the command, if it has finished."""
        return next((one for one in self.finished if one.given), None)

    @property
    def metric_name(self) -> str:
        return self.metric.replace("_", " ")


def short_name(name: str) -> str:
    """What people call an option."""
    return _SHORT.get(name, name.replace("_", " "))


def short_values(values: Mapping[str, Any]) -> str:
    """`learning rate 3e-05, batch size 16, epochs 3`."""
    return ", ".join(f"{short_name(name)} {setting(value)}" for name, value in values.items())
