"""A search from its command to its page. The same command continues a search that was stopped or killed."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import logging
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from typing import Any

from rich.console import Console

from stoker.english import counted
from stoker.errors import UserError
from stoker.hf.checkpointing import folders, lock
from stoker.run_report.compare import is_lower_better
from stoker.run_report.log import NAME as RUN_LOG
from stoker.tasks import training_run
from stoker.tasks.display import Display
from stoker.tasks.option_parser import OptionParser
from stoker.tasks.tune.trials import END, Trials, finite_metric, folder_name, warn_once
from stoker.tasks.tune.tune_command import BY_EVALUATION, IGNORED, SearchCommand, SearchOptions
from stoker.tasks.tune.tune_results import PAGE, RECIPE, Results
from stoker.tasks.tune.tune_study import (
    GIVEN,
    IDENTITY,
    JOURNAL,
    STUDY,
    Journal,
    done,
    make_pruner,
    make_sampler,
    retry_unfinished,
)

__all__ = ["run_search"]

log = logging.getLogger("stoker")


def run_search(task: str, options: dict[str, Any], search: SearchOptions) -> int:
    """`options` are those of `stoker train`, by name. Returns the exit code."""
    command = SearchCommand.of(task, options, search)
    module = importlib.import_module(f"stoker.tasks.{task}.fine_tune")
    with warn_once():
        job: training_run.Job = module.begin(command.trial_arguments({}, command.folder))
        for name, instead in IGNORED.items():
            if options.get(name):
                log.warning("--%s is ignored in a search; %s", name, instead)
        _check(command, job)
        with lock.only_run_in(command.folder):
            _refuse_training_run(command)
            return _Search(command, module, job).run()


def _check(command: SearchCommand, job: training_run.Job) -> None:
    """Checks, before anything is read, that the options can be searched and that the ends of the space are valid."""
    if job.args.world_size > 1:
        raise UserError("stoker tune runs in one process, which uses all cores; start it without `stoker launch`")
    schedule = str(getattr(job.args.lr_scheduler_type, "value", job.args.lr_scheduler_type))
    if schedule in BY_EVALUATION:
        raise UserError(
            f"--lr_scheduler_type {schedule} follows the evaluations, which are others in a search; use another one"
        )
    command.check_space(OptionParser(f"train {command.task}", type(job.data), arguments=type(job.args)).read)


def _refuse_training_run(command: SearchCommand) -> None:
    folder = command.folder
    if (folder / RUN_LOG).exists() or folders.all_checkpoints(folder):
        raise UserError(f"{folder} has a training run; give another --output_dir for the search")


def _remove_earlier(command: SearchCommand) -> None:
    for name in (JOURNAL, RECIPE, PAGE):
        (command.folder / name).unlink(missing_ok=True)
    for trial in command.folder.glob("trial-[0-9]*"):
        shutil.rmtree(trial, ignore_errors=True)


class _Search:
    def __init__(self, command: SearchCommand, module: Any, job: training_run.Job) -> None:
        self.command, self.module, self.job = command, module, job
        self.console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
        self.journal: Journal | None = None
        """Opened when it exists or when the first trial can begin, so that bad input leaves no file behind."""

    def run(self) -> int:
        command, study = self.command, self._earlier()
        if study is not None:
            retry_unfinished(study)
            self.console.print(
                f"continuing the search in {command.folder}: {done(study)} of {counted(command.wanted, 'trial')} done"
            )
            if done(study) >= command.wanted:
                return self._finish(self._results(study))
        prepared: training_run.Prepared = self.module.prepare(self.job)
        metric = self._metric(prepared)
        if study is None:
            # not before: what was found outlives a mistake in the new command
            if command.options.get("overwrite_output_dir"):
                _remove_earlier(command)
            study = self._create(metric)
        training_run.machine_rates(self.job.print)
        return self._run_trials(study, prepared, metric)

    def _earlier(self) -> Any:
        """The search to continue; None if there is none, or if it is to start over."""
        folder = self.command.folder
        if self.command.options.get("overwrite_output_dir") or not os.path.lexists(folder / JOURNAL):
            return None
        self.journal = Journal(folder)
        return self.journal.find(self.command.identity)

    def _metric(self, prepared: training_run.Prepared) -> str:
        wanted = (self.command.search.metric or prepared.metrics[0]).removeprefix("eval_")
        if wanted not in prepared.metrics:
            raise UserError(f"--metric {wanted} is not measured; choose one of {', '.join(prepared.metrics)}")
        return wanted

    def _create(self, metric: str) -> Any:
        """A new search, whose first trial has the options of the command if they are in the space."""
        direction = self.command.search.direction or ("minimize" if is_lower_better(metric) else "maximize")
        self.journal = self.journal or Journal(self.command.folder)
        study = self.journal.create({**self.command.identity, "metric": metric, "direction": direction}, direction)
        given = {name: self._given(name) for name in self.command.space.names}
        if (first := self.command.space.start(given)) is not None:
            study.enqueue_trial(first, user_attrs={GIVEN: True})
        return study

    def _given(self, name: str) -> Any:
        value = getattr(self.job.args, name, getattr(self.job.data, name, None))
        return getattr(value, "value", value)

    def _run_trials(self, study: Any, prepared: training_run.Prepared, metric: str) -> int:
        command, search, results = self.command, self.command.search, self._results(study)
        assert self.journal is not None
        size = f"; {command.space.size} combinations" if command.space.size else ""
        self.console.print(f"searching {command.space.text} for the best {metric}{size}")

        def make(trial: Any, values: dict[str, Any]) -> Any:
            return self._trainer(prepared, trial.number, values)

        trials = Trials(command.folder, make, results.show_new, search.evaluations)
        try:
            with _terminated():
                trials.hyperparameter_search(
                    hp_space=command.space.suggest, compute_objective=finite_metric(metric),
                    n_trials=command.wanted - done(study), direction=study.direction.name.lower(), backend="optuna",
                    hp_name=lambda trial: "", study_name=STUDY, storage=self.journal.storage, load_if_exists=True,
                    sampler=make_sampler(command.space, command.wanted, self.job.args.seed + len(study.trials)),
                    pruner=make_pruner(search.prune_after, END), timeout=search.seconds, gc_after_trial=True,
                )  # fmt: skip
        except KeyboardInterrupt as stop:
            return self._interrupted(results, study, 143 if isinstance(stop, _Terminated) else 130)
        except ValueError:
            # transformers asks for the best when there is none; a trial that has failed is another matter.
            if trials.failed or any(trial.value is not None for trial in study.trials):
                raise
        return self._finish(results)

    def _results(self, study: Any) -> Results:
        metric = study.user_attrs[IDENTITY]["metric"]
        return Results(self.command, study, metric, self.job.model.model_name_or_path, self.console)

    def _trainer(self, prepared: training_run.Prepared, number: int, values: dict[str, Any]) -> Any:
        """The trainer of a trial, as `stoker train` would make it."""
        folder = self.command.folder / folder_name(number)
        job = self.module.begin(self.command.trial_arguments(values, folder))
        job = dataclasses.replace(job, console=Console(quiet=True))
        trainer = prepared.trainer(job)
        training_run.check_and_describe(job, trainer, **prepared.training)
        trainer.recorder.task["command"] = self.command.train_command(values, folder)
        trainer.remove_callback(Display)
        trainer.add_callback(Display(title=f"trial {number + 1}", lines=False))
        return trainer

    def _finish(self, results: Results) -> int:
        results.show_new()
        results.write()
        results.summary()
        return 0 if results.tuning_best() is not None else 1

    def _interrupted(self, results: Results, study: Any, code: int) -> int:
        stopped = [str(number + 1) for number in retry_unfinished(study)]
        results.write()
        self.console.print(f"stopped in trial {', '.join(stopped)}, which will be repeated" if stopped else "stopped")
        if results.tuning_best() is not None:
            results.summary()
        self.console.print(f"To go on:\n  {self.command.again}")
        return code


class _Terminated(KeyboardInterrupt):
    """SIGTERM, which ends a search like Ctrl-C."""


@contextlib.contextmanager
def _terminated() -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise _Terminated

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
