"""Runs of a task side by side: the settings in which they differ, their best value of a metric, speed, duration and state."""

from __future__ import annotations

import contextlib
import functools
import shlex
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.command_options import options_of
from stoker.errors import UserError
from stoker.numbers import finite_number
from stoker.option_effects import changes_result
from stoker.run_report.figures import SCORES, median, points, smooth
from stoker.run_report.log import NAME, Run, read_run
from stoker.run_report.run_state import State, state_of
from stoker.user_files import require_run_folder

__all__ = [
    "Best",
    "Comparison",
    "RunSummary",
    "choose_metric",
    "compare_by_task",
    "differing_settings",
    "find_runs",
    "is_lower_better",
    "metrics_of",
    "summary_of",
]

_DEPTH = 3
_MOST_RUNS = 1000
_LOWER = ("loss", "perplexity", "mse", "mae", "rmse", "error", "runtime", "duration", "wer", "cer")
_SHOWN_OTHERWISE = {"model_name_or_path", "model", "cpu", "threads"}
_FIRST = (
    "model", "train_file", "dataset_name", "learning_rate", "num_train_epochs", "max_steps", "per_device_train_batch_size",
    "tokens_per_batch", "gradient_accumulation_steps", "max_seq_length", "max_length", "full", "lora_r", "loss", "seed",
    "warmup_steps", "weight_decay", "lr_scheduler_type", "optim", "bf16", "label_smoothing_factor", "local_sgd",
    "gradient_compression", "cpu", "threads",
)  # fmt: skip
"""The settings that people compare, the most important first. Others follow if a user has typed them."""
_COLUMNS, _NAMED = 6, 8
"""Settings that a table has room for, and that are named below it."""
_OWN_SCORES = {
    "qa": ("f1", "exact_match", "exact"), "classify": ("accuracy", "f1", "matthews_correlation", "pearson"), "ner": ("f1",),
    "fewshot": ("accuracy", "f1"), "mlm": ("loss", "perplexity"), "sft": ("right", "loss"),
    "embed": ("cosine_ndcg@10", "spearman_cosine", "cosine_accuracy", "cosine_ap"),
    "rerank": ("ndcg@10", "spearman", "average_precision", "f1_macro", "map"),
}  # fmt: skip
"""By what each task is judged, the usual score first; other scores are used if no run has one of these."""
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
    def task(self) -> str:
        """Empty for the run of a script."""
        return str(self.run.start.get("task") or "")

    @functools.cached_property
    def typed(self) -> dict[str, Any]:
        """The options of its command."""
        with contextlib.suppress(ValueError):  # unbalanced quotes: not a command that a shell would take
            return options_of(shlex.split(self.run.start.get("command") or ""))
        return {}

    @functools.cached_property
    def settings(self) -> dict[str, Any]:
        """What may change the result: the model, options and arguments with their values, and the machine."""
        start = self.run.start
        found = {**self.typed, **(start.get("arguments") or {}), **(start.get("settings") or {})}
        machine = start.get("machine") or {}
        shown = {
            "model": start.get("model") or found.get("model_name_or_path"),
            **{name: _as_number(value) for name, value in found.items()
               if changes_result(name) and name not in _SHOWN_OTHERWISE},
            **{name: machine.get(name) for name in ("cpu", "threads")},
        }  # fmt: skip
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
    """Runs of one task, the best first, and what to show of them."""

    task: str
    """Empty for runs of scripts."""
    runs: tuple[RunSummary, ...]
    metric: str | None
    """None if nothing was measured yet."""

    @property
    def metric_name(self) -> str:
        return (self.metric or "").removeprefix("eval_").replace("_", " ")

    @functools.cached_property
    def differing(self) -> dict[str, list[Any]]:
        return differing_settings(self.runs)

    @property
    def columns(self) -> dict[str, list[Any]]:
        """The most important settings in which the runs differ."""
        return {name: self.differing[name] for name in self.important[:_COLUMNS]}

    @functools.cached_property
    def important(self) -> list[str]:
        """The differing settings that people compare, then others that were typed; the rest follows from these."""
        known = [name for name in _FIRST if name in self.differing]
        typed = {name for one in self.runs for name in one.typed}
        return [*known, *(name for name in self.differing if name in typed and name not in known)]

    def also_differ_in(self, shown: Collection[str]) -> str:
        """A sentence about differing settings other than these; empty if there are none."""
        named = [name for name in self.important if name not in shown][:_NAMED]
        more = len(self.differing) - len(shown) - len(named)
        if not named and not more:
            return ""
        parts = [", ".join(named)] if named else []
        return f"They also differ in {' and '.join([*parts, *([f'{more} more'] if more else [])])}; --json shows all."


def compare_by_task(folders: Sequence[Path], by: str | None) -> list[Comparison]:
    """The runs in these folders, task by task, each sorted by `by` or by the task's own score."""
    runs = find_runs(folders)
    if by is not None:
        choose_metric(runs, by)  # UserError if no run has it
    found = []
    for task in sorted({one.task for one in runs}, key=lambda name: (not name, name)):
        same = [one for one in runs if one.task == task]
        wanted = by if by is not None and {by, f"eval_{by}"} & {*metrics_of(same)} else None
        metric = choose_metric(same, wanted)
        found.append(Comparison(task, tuple(sorted(same, key=lambda one: _rank(one, metric))), metric))
    return found


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
    """The metric with this name, with or without `eval_`; by default the task's own score, else the first that was measured."""
    known = metrics_of(runs)
    if by is None:
        own = [f"eval_{name}" for one in runs[:1] for name in _OWN_SCORES.get(one.task, ()) if f"eval_{name}" in known]
        if own:
            return max(own, key=lambda name: sum(one.best(name) is not None for one in runs))
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
    """The settings in which the runs differ, with the value of each run; None where it is not known."""
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
