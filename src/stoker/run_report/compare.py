"""Several runs side by side: the settings in which they differ, their best value of a metric, speed, duration and state."""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.command_options import options_of
from stoker.errors import UserError
from stoker.numbers import finite_number
from stoker.run_report.figures import SCORES, median, points, smooth
from stoker.run_report.log import NAME, Run, read_run
from stoker.run_report.run_state import State, state_of
from stoker.user_files import require_run_folder

__all__ = [
    "Best",
    "Comparison",
    "RunSummary",
    "choose_metric",
    "differing_settings",
    "find_runs",
    "is_lower_better",
    "metrics_of",
    "summary_of",
]

_DEPTH = 3
_MOST_RUNS = 1000
_LOWER = ("loss", "perplexity", "mse", "mae", "rmse", "error", "runtime", "duration", "wer", "cer")
_OF_ONE_RUN = {
    "output_dir", "run_name", "logging_dir", "resume_from_checkpoint", "overwrite_output_dir", "hub_model_id", "push_to_hub",
    "live", "live_port", "live_host", "do_train", "do_eval", "do_predict", "report_to", "logging_steps", "model_name_or_path",
    "model", "cpu", "threads", "",
}  # fmt: skip
"""Options that say where and how often a run writes, and those that are shown by another name."""
_FROM_LOG = ("tokens_per_second", "share_of_peak", "loss", "duration")
"""Besides the metrics of evaluations."""


@dataclass(frozen=True)
class Best:
    value: float
    step: int | None
    """None for figures of the whole run."""


@dataclass(frozen=True)
class RunSummary:
    folder: Path
    name: str
    """What distinguishes its folder from those of the others."""
    run: Run
    state: State

    @property
    def settings(self) -> dict[str, Any]:
        """The model, the options that were typed, all arguments that differ from their defaults, and the machine."""
        typed: dict[str, Any] = {}
        with contextlib.suppress(ValueError):  # unbalanced quotes: not a command that a shell would take
            typed = options_of(shlex.split(self.run.start.get("command") or ""))
        found = {**typed, **(self.run.start.get("arguments") or {})}
        machine = self.run.start.get("machine") or {}
        shown = {
            "model": self.run.start.get("model") or found.get("model_name_or_path"),
            **{name: _as_number(value) for name, value in found.items() if name not in _OF_ONE_RUN},
            **{name: machine.get(name) for name in ("cpu", "threads")},
        }
        return {name: value for name, value in shown.items() if value is not None}

    @property
    def tokens_per_second(self) -> float | None:
        return median(self.run, "tokens_per_second")

    def best(self, metric: str) -> Best | None:
        """The best value of a metric; of the training loss, the last running mean."""
        if metric == "duration":
            return Best(self.run.seconds, None) if self.run.start else None
        if metric in ("tokens_per_second", "share_of_peak"):
            value = median(self.run, metric)
            return None if value is None else Best(value, None)
        if metric == "loss":
            steps, losses = points(self.run.steps, "loss")
            return Best(smooth(losses)[-1], int(steps[-1])) if steps else None
        steps, values = points(self.run.evaluations, metric)
        if not steps:
            return None
        at = (min if is_lower_better(metric) else max)(range(len(values)), key=values.__getitem__)
        return Best(values[at], int(steps[at]))


@dataclass(frozen=True)
class Comparison:
    """Runs, the best first, and what to show of them."""

    runs: tuple[RunSummary, ...]
    metric: str | None
    """None if nothing was measured yet."""

    @classmethod
    def of(cls, folders: Sequence[Path], by: str | None) -> Comparison:
        runs = find_runs(folders)
        metric = choose_metric(runs, by)
        return cls(tuple(sorted(runs, key=lambda one: _rank(one, metric))), metric)

    @property
    def metric_name(self) -> str:
        return (self.metric or "").removeprefix("eval_").replace("_", " ")

    @property
    def differing(self) -> dict[str, list[Any]]:
        return differing_settings(self.runs)


def _rank(one: RunSummary, metric: str | None) -> tuple[bool, float, str]:
    best = one.best(metric) if metric else None
    if best is None:
        return True, 0.0, one.name
    return False, best.value if is_lower_better(metric or "") else -best.value, one.name


def is_lower_better(metric: str) -> bool:
    words = metric.replace("-", "_").split("_")
    return words[-1] in _LOWER


def find_runs(folders: Sequence[Path]) -> list[RunSummary]:
    """The runs in these folders and below them; UserError for a folder that has none."""
    found: dict[Path, Path] = {}
    for folder in folders:
        require_run_folder(folder)
        below = _runs_below(folder, _DEPTH)
        if not below:
            raise UserError(f"{folder} has no run.jsonl, the log of a training run, and no folder below it has one")
        found |= {one.resolve(): one for one in below}
    if len(found) > _MOST_RUNS:
        raise UserError(
            f"{len(found):,} runs were found, and at most {_MOST_RUNS:,} can be compared; name fewer folders"
        )
    paths = list(found.values())
    return [_readable_summary(path, name) for path, name in zip(paths, _names(paths), strict=True)]


def _runs_below(folder: Path, depth: int) -> list[Path]:
    if (folder / NAME).exists():
        return [folder]
    if depth == 0:
        return []
    try:
        inside = sorted(one for one in folder.iterdir() if one.is_dir() and not one.name.startswith("."))
    except OSError:
        return []
    return [run for one in inside for run in _runs_below(one, depth - 1)]


def _readable_summary(folder: Path, name: str) -> RunSummary:
    try:
        return summary_of(folder, name)
    except OSError as error:
        raise UserError(f"{folder / NAME} cannot be read: {error.strerror}") from None


def summary_of(folder: Path, name: str) -> RunSummary:
    """The run in a folder. Raises OSError if its log cannot be read."""
    run = read_run(folder)
    quiet_for = time.time() - run.last_time if run.last_time is not None else 0.0
    return RunSummary(folder, name, run, state_of(run, max(quiet_for, 0.0)))


def _names(paths: Sequence[Path]) -> list[str]:
    """The paths without the folders that all of them are in."""
    parts = [one.resolve().parts for one in paths]
    common = 0
    while all(len(one) > common + 1 for one in parts) and len({one[common] for one in parts}) == 1:
        common += 1
    return ["/".join(one[common:]) for one in parts]


def metrics_of(runs: Sequence[RunSummary]) -> list[str]:
    """What runs can be sorted by, the usual scores first."""
    measured = {
        name
        for one in runs
        for entry in one.run.evaluations
        for name in entry
        if name.startswith("eval_") and points([entry], name)[0]
    }
    usual = [f"eval_{name}" for name, _, _ in SCORES if f"eval_{name}" in measured]
    rest = sorted(measured - set(usual), key=lambda name: (name != "eval_loss", name))
    return [*usual, *rest, *(name for name in _FROM_LOG if any(one.best(name) for one in runs))]


def choose_metric(runs: Sequence[RunSummary], by: str | None) -> str | None:
    """The metric with this name, with or without `eval_`; by default the first score that was measured."""
    known = metrics_of(runs)
    if by is None:
        scores = [name for name in known if name.removeprefix("eval_") in {row[0] for row in SCORES}]
        if scores:  # of those that most runs have, the first
            return max(scores, key=lambda name: sum(one.best(name) is not None for one in runs))
        return next((name for name in ("eval_loss", "loss", *known) if name in known), None)
    for name in (by, f"eval_{by}"):
        if name in known:
            return name
    if not known:
        raise UserError(f"--by {by}: these runs have logged nothing yet")
    names = [name.removeprefix("eval_") if name != "eval_loss" else name for name in known]
    raise UserError(f"--by {by} was not measured; choose one of {', '.join(names[:30])}")


def differing_settings(runs: Sequence[RunSummary]) -> dict[str, list[Any]]:
    """The settings in which the runs differ, with the value of each run; None where it is the default."""
    all_settings = [one.settings for one in runs]
    names = list(dict.fromkeys(name for settings in all_settings for name in settings))
    rows = {name: [settings.get(name) for settings in all_settings] for name in names}
    return {name: values for name, values in rows.items() if len({repr(value) for value in values}) > 1}


def _as_number(value: Any) -> Any:
    """A number if it is one, so that 5e-5 on a command line equals 5e-05 in the log."""
    if isinstance(value, bool):
        return value
    number = finite_number(str(value)) if isinstance(value, str | int | float) else None
    return value if number is None else int(number) if number.is_integer() and abs(number) < 1e15 else number
