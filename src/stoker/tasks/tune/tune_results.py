"""What a search shows and keeps: a line for each trial, the best recipe, the page."""

from __future__ import annotations

import shlex
import time
import warnings
from pathlib import Path

import optuna
from optuna.trial import FrozenTrial, TrialState
from rich.console import Console

from stoker import __version__
from stoker.english import counted, duration
from stoker.errors import one_line
from stoker.run_report.log import read_run
from stoker.run_report.tuning import TrialRow, Tuning, short_values
from stoker.tasks import recipe
from stoker.tasks.tune.trials import folder_name
from stoker.tasks.tune.tune_command import SearchCommand
from stoker.tasks.tune.tune_study import GIVEN, OUTCOME, REASON, VALUES

__all__ = ["Results"]

RECIPE, PAGE, BEST = "best_recipe.yaml", "report.html", "best"
"""In the folder of the search; the last is where the best would be trained."""
_ENOUGH = 8
"""Trials that must have finished before importances mean anything: their estimate compares the better tenth with the rest."""
_PAGE_EVERY = 30.0
"""Seconds. Drawing the page takes one or two, which short trials would notice."""
_STATES = {
    TrialState.COMPLETE: "finished", TrialState.PRUNED: "pruned", TrialState.RUNNING: "running",
    TrialState.WAITING: "queued", TrialState.FAIL: "killed",
}  # fmt: skip


class Results:
    """Of one search; `show_new` prints the trials that have ended since it was last called."""

    def __init__(self, command: SearchCommand, study: optuna.Study, metric: str, model: str, console: Console) -> None:
        self.command, self.study, self.metric, self.model = command, study, metric, model
        self.lower = study.direction == optuna.study.StudyDirection.MINIMIZE
        self.console = console
        self._shown = {trial.number for trial in self._trials if trial.state.is_finished()}
        self._page_works = True
        self._page_written = -_PAGE_EVERY

    @property
    def _trials(self) -> list[FrozenTrial]:
        found: list[FrozenTrial] = self.study.get_trials(deepcopy=False)
        return found

    def tuning(self, *, running: bool) -> Tuning:
        rows = [self._row(trial) for trial in self._trials]
        sign = 1.0 if self.lower else -1.0
        rows.sort(
            key=lambda one: (one.state != "finished", sign * (one.score or 0.0) if one.state == "finished" else 0.0)
        )
        best = next((one for one in rows if one.state == "finished"), None)
        folder = self.command.folder
        return Tuning(
            title=f"{_name(self.model)}, tuned for {self.command.task}", metric=self.metric, lower=self.lower, rows=rows,
            wanted=self.command.wanted, running=running,
            parameters=[(one.name, one.text, one.log) for one in self.command.space.parameters],
            train=self._train_best if best else "",
            train_in_full=self.command.train_command(dict(best.values), folder / BEST) if best else "",
            again=self.command.again, importance=self._importance(len([one for one in rows if one.state == "finished"])),
            version=__version__,
        )  # fmt: skip

    @property
    def _train_best(self) -> str:
        return shlex.join(["stoker", "train", str(self.command.folder / RECIPE)])

    def _row(self, trial: FrozenTrial) -> TrialRow:
        curve = tuple(sorted((float(step), value) for step, value in trial.intermediate_values.items()))
        score = trial.value if trial.state == TrialState.COMPLETE else curve[-1][1] if curve else None
        return TrialRow(
            trial.number, self.command.folder / folder_name(trial.number),
            trial.user_attrs.get(OUTCOME) or _STATES[trial.state], trial.user_attrs.get(VALUES, trial.params), score,
            curve, trial.user_attrs.get(REASON, ""), bool(trial.user_attrs.get(GIVEN)),
        )  # fmt: skip

    def _importance(self, finished: int) -> dict[str, float]:
        if finished < _ENOUGH or len(self.command.space.parameters) < 2:
            return {}
        evaluator = optuna.importance.PedAnovaImportanceEvaluator
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                return dict(optuna.importance.get_param_importances(self.study, evaluator=evaluator()))
            except (ValueError, RuntimeError, ZeroDivisionError):  # all trials have the same values, or the same score
                return {}

    def show_new(self) -> None:
        """Prints the trials that have ended, and brings recipe and page up to date."""
        new = [trial for trial in self._trials if trial.state.is_finished() and trial.number not in self._shown]
        if new:
            self._shown |= {trial.number for trial in new}
            self.write(running=True)
        best = self.tuning_best()
        for trial in new:
            self.console.print(self._line(self._row(trial), best))

    def tuning_best(self) -> TrialRow | None:
        finished = [self._row(trial) for trial in self._trials if trial.state == TrialState.COMPLETE]
        choose = min if self.lower else max
        return choose(finished, key=lambda one: one.score or 0.0, default=None)

    def _line(self, row: TrialRow, best: TrialRow | None) -> str:
        """One line about a trial that has ended."""
        score = "" if row.score is None else f"{self.metric} {row.score:.4g}"
        at = f" after {row.curve[-1][0]:.0f}% of its training" if row.state == "pruned" and row.curve else ""
        how = score if row.state == "finished" else ", ".join(filter(None, [f"{row.state}{at}", score]))
        spent = self._seconds(row)
        repeated = sum(trial.state == TrialState.FAIL for trial in self._trials)  # after a kill, and not counted
        parts = [f"trial {row.number + 1} of {self.command.wanted + repeated}: {how}", short_values(row.values)]
        parts += [duration(spent)] if spent else []
        if best is not None:
            parts.append(
                "the best so far" if best.number == row.number else f"best {best.score:.4g} (trial {best.number + 1})"
            )
        return "; ".join(parts)

    def _seconds(self, row: TrialRow) -> float:
        try:
            return read_run(row.folder).seconds
        except OSError:
            return 0.0

    def write(self, *, running: bool = False) -> None:
        """Writes the recipe of the best trial and the page."""
        found = self.tuning(running=running)
        if found.best is not None:
            folder = self.command.folder
            arguments = self.command.train_arguments(dict(found.best.values), folder / BEST)
            recipe.write(folder, self.command.task, arguments, name=RECIPE, repeats=f"trial {found.best.number + 1}")
        if not self._page_works or (running and time.monotonic() - self._page_written < _PAGE_EVERY):
            return
        self._page_written = time.monotonic()
        try:
            from stoker.run_report.page import write_html
            from stoker.run_report.tuning_page import render_tuning
        except ImportError as error:
            self._page_works = False
            self.console.print(
                f"{PAGE} was not written: {one_line(error)}; install what it needs with pip install 'stoker[report]'"
            )
        else:
            write_html(render_tuning(found), self.command.folder / PAGE)

    def summary(self) -> None:
        """Prints what was found, and how to train with it."""
        found = self.tuning(running=False)
        others = {
            state: sum(one.state == state for one in found.rows)
            for state in dict.fromkeys(one.state for one in found.rows)
        }
        counts = ", ".join(f"{count} {state}" for state, count in others.items())
        self.console.print(f"{counted(len(found.rows), 'trial')}: {counts}")
        best, first = found.best, found.first
        if best is None:
            self.console.print("no trial has finished; try lower learning rates, or smaller batches, in --search")
            return
        before = ""
        if first is not None and first is not best:
            before = f" (with the options of the command: {first.score:.4g})"
        self.console.print(
            f"best {self.metric}: {best.score:.4g} in trial {best.number + 1}{before}; {short_values(best.values)}"
        )
        self.console.print(f"train it:  {found.train}")
        page = self.command.folder / PAGE
        shown = f"report in {page}; " if page.exists() else ""
        self.console.print(f"{shown}compare the trials:  {shlex.join(['stoker', 'runs', str(self.command.folder)])}")


def _name(model: str) -> str:
    """A model's name on the hub, or the end of its path: the last folder alone is often called `model`."""
    return "/".join(Path(model).absolute().parts[-2:]) if Path(model).exists() else model
