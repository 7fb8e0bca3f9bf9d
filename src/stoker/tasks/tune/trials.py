"""One trial after the other, by transformers' `hyperparameter_search`.

transformers would set the values in the arguments of one trainer and load its model again. Here each trial has a trainer of its
own, built as `stoker train` builds it, because more follows from the values than a trainer reads again: the adapter and its rank,
the loss, how batches are formed, what TRL does to a model. A trial is therefore exactly the run that its command repeats.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
import torch
import transformers

from stoker.errors import UserError, first_line, outside_reason
from stoker.hf.arguments import TrainingArguments
from stoker.hf.non_finite import NonFiniteLoss
from stoker.hf.trainer import Trainer
from stoker.requires import require
from stoker.tasks.memory_estimate import NotEnoughMemory
from stoker.tasks.tune.tune_study import DIVERGED, FAILED, INTERRUPTED, OUTCOME, REASON, REPEATED, TOO_LARGE, VALUES

__all__ = ["END", "Trials", "finite_metric", "folder_name", "warn_once"]

log = logging.getLogger("stoker")

END = 100
"""Trials report their scores by percent of their training: with other batch sizes they have other numbers of steps."""


def folder_name(number: int) -> str:
    """The folder of a trial, with its run log. People count from 1."""
    return f"trial-{number + 1:03d}"


class Trials(transformers.Trainer):  # type: ignore[misc]
    """Runs the trials: `make` builds the trainer of each from its values, `before` is called before each."""

    def __init__(
        self, folder: Path, make: Callable[[Any, dict[str, Any]], Trainer], before: Callable[[], None], evaluations: int
    ) -> None:
        require("hyperparameter search")
        args = TrainingArguments(str(folder), report_to="none")
        super().__init__(args=args, model_init=lambda: torch.nn.Identity())  # never trained
        self._make, self._before, self._evaluations = make, before, evaluations
        self.failed = False
        """Whether a trial has ended with an error, which then ends the search."""

    def train(self, resume_from_checkpoint: Any = None, trial: Any = None, *rest: Any, **named: Any) -> None:
        """Trains one trial. A loss that is no longer finite, and batches that do not fit, are results and not errors."""
        self._before()
        values = self.hp_space(trial)
        trial.set_user_attr(VALUES, values)
        if (same := _with_values(trial.study, values)) is not None:
            trial.set_user_attr(OUTCOME, REPEATED)
            trial.set_user_attr(REASON, f"it would repeat trial {same.number + 1}, whose score it has")
            self.objective = same.value
            return
        try:
            self.objective = self._train(trial, values)
        except NonFiniteLoss as error:
            self._give_up(trial, DIVERGED, error)
        except NotEnoughMemory as error:
            self._give_up(trial, TOO_LARGE, error)
        except optuna.TrialPruned:
            raise
        except KeyboardInterrupt:
            trial.set_user_attr(OUTCOME, INTERRUPTED)
            raise
        except Exception as error:
            if (reason := outside_reason(error)) is not None and isinstance(error, MemoryError | RuntimeError):
                self._give_up(trial, TOO_LARGE, UserError(reason))
            self.failed = True
            trial.set_user_attr(OUTCOME, FAILED)
            trial.set_user_attr(REASON, first_line(error))
            raise

    def _train(self, trial: Any, values: dict[str, Any]) -> float:
        trainer: Any = self._make(trial, values)
        for name in ("hp_search_backend", "compute_objective", "hp_name"):
            setattr(trainer, name, getattr(self, name))
        trainer.hp_space = lambda trial: {}  # its arguments have the values already
        evaluations = _Evaluations(self._evaluations)
        trainer.add_callback(evaluations)
        trainer.report_position = evaluations.position
        trainer.train(trial=trial)
        if evaluations.last != trainer.state.global_step:  # something has ended training early
            return float(self.compute_objective(trainer.evaluate()))
        return float(trainer.objective)

    def _give_up(self, trial: Any, outcome: str, error: UserError) -> None:
        """Ends a trial as a pruned one, so that Optuna learns to avoid such values."""
        trial.set_user_attr(OUTCOME, outcome)
        trial.set_user_attr(REASON, first_line(error))
        raise optuna.TrialPruned from None


def _with_values(study: Any, values: dict[str, Any]) -> Any:
    """A trial with the same options that has finished; None if there is none. It would be repeated bit for bit."""
    finished = study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.COMPLETE,))
    return next((one for one in finished if one.user_attrs.get(VALUES) == values), None)


class _Evaluations(transformers.TrainerCallback):  # type: ignore[misc]
    """Evaluates a trial at equal parts of its training, the last time at its end."""

    def __init__(self, times: int) -> None:
        self.times = times
        self.last = -1
        """The step of the last evaluation."""
        self._steps = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self._steps = state.max_steps

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        if state.global_step in {math.ceil(self._steps * part / self.times) for part in range(1, self.times + 1)}:
            control.should_evaluate = True
            self.last = state.global_step

    def position(self, step: int) -> int:
        """The percentage of training after which these steps are evaluated."""
        return END * (step * self.times // max(self._steps, 1)) // self.times


class _Once(logging.Filter):
    """Lets each message pass once."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        new = message not in self._seen
        self._seen.add(message)
        return new


@contextmanager
def warn_once() -> Iterator[None]:
    """Within this context, what concerns every trial is printed for the first only."""
    once = _Once()
    log.addFilter(once)
    try:
        yield
    finally:
        log.removeFilter(once)


def finite_metric(name: str) -> Callable[[dict[str, float]], float]:
    """The objective of a search by a metric, for transformers. A trial whose metric is not finite has diverged."""

    def objective(metrics: dict[str, float]) -> float:
        value = metrics.get(f"eval_{name}")
        if value is None:
            measured = sorted(one.removeprefix("eval_") for one in metrics if one.startswith("eval_"))
            raise UserError(f"--metric {name} was not measured; choose one of {', '.join(measured)}")
        if not math.isfinite(value):
            raise NonFiniteLoss(f"{name} is {value}")
        return float(value)

    return objective
