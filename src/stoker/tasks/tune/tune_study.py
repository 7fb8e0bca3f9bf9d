"""The trials of a search in Optuna's journal, a file in the output folder to which each change is appended.

A kill can leave half a line, and a trial that seems to run. Both are put right when the search continues: the line is cut off,
the trial is marked as failed, and its values are tried once more.
"""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import optuna

from stoker.errors import UserError, first_line
from stoker.tasks.tune.search_space import Space
from stoker.tasks.tune.tune_command import CONTENTS

__all__ = [
    "DIVERGED", "FAILED", "GIVEN", "IDENTITY", "INTERRUPTED", "JOURNAL", "OUTCOME", "REASON", "REPEATED", "STUDY", "TOO_LARGE",
    "VALUES", "Journal", "done", "make_pruner", "make_sampler", "retry_unfinished",
]  # fmt: skip

JOURNAL = "optuna.journal"
STUDY = "stoker"
IDENTITY = "stoker_search"
"""What the study keeps about its search; see `SearchCommand.identity`."""
VALUES, OUTCOME, REASON, GIVEN = "values", "outcome", "reason", "as_given"
"""What is stored with a trial: the options that it had, how it ended if neither finished nor pruned and why, and whether its
options are those of the command."""
DIVERGED, TOO_LARGE, FAILED, REPEATED, INTERRUPTED = "diverged", "too large", "failed", "repeated", "interrupted"
"""Outcomes."""
_RETRIED, _ATTEMPT, _ATTEMPTS = "retry_of", "attempt", 3
_FEW = 2
"""Combinations for each trial: with so few, TPE would try many of them twice."""
_DONE = (optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.PRUNED)

optuna.logging.set_verbosity(optuna.logging.ERROR)  # `stoker tune` prints its own line for each trial


class _HeldLock:
    """The search has locked its folder, so that nobody else writes; a lock file of Optuna's would outlive a kill."""

    def acquire(self) -> bool:
        return True

    def release(self) -> None: ...


class Journal:
    """The file, and the search in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / JOURNAL
        with _damage_as_user_error(self.path):
            _cut_half_line(self.path)
            backend = optuna.storages.journal.JournalFileBackend(str(self.path), lock_obj=_HeldLock())
            self.storage = optuna.storages.JournalStorage(backend)

    def find(self, identity: Mapping[str, Any]) -> optuna.Study | None:
        """The search that was begun here; None if there is none. UserError if it is another one than `identity` describes."""
        with _damage_as_user_error(self.path):
            if not any(one.study_name == STUDY for one in optuna.get_all_study_summaries(self.storage)):
                return None
            study = optuna.load_study(study_name=STUDY, storage=self.storage)
            known = study.user_attrs.get(IDENTITY)
        if known is None and not study.trials:  # killed as it began
            optuna.delete_study(study_name=STUDY, storage=self.storage)
            return None
        self._compare(known, identity)
        return study

    def create(self, identity: Mapping[str, Any], direction: str) -> optuna.Study:
        study = optuna.create_study(study_name=STUDY, storage=self.storage, direction=direction)
        study.set_user_attr(IDENTITY, dict(identity))
        return study

    def _compare(self, known: Any, identity: Mapping[str, Any]) -> None:
        instead = "give another --output_dir, or --overwrite_output_dir to start over"
        if not isinstance(known, dict):
            raise UserError(f"{self.path} is not of `stoker tune`; {instead}")
        old, new = ({**one, **one.get("options", {})} for one in (known, identity))
        for name in (*new, *old):
            if name == "options" or (name in ("metric", "direction") and new[name] is None):  # as it was begun
                continue
            if name == CONTENTS:
                if None not in (old.get(name), new.get(name)) and old[name] != new[name]:
                    raise UserError(
                        f"{self.folder} has a search with other contents of the data or the model; {instead}"
                    )
                continue
            if old.get(name) != new.get(name):
                raise UserError(
                    f"{self.folder} has a search with {_shown(name, old.get(name))}, and this one has "
                    f"{_shown(name, new.get(name))}; {instead}"
                )


def _shown(name: str, value: Any) -> str:
    if name == "task":
        return f"the task {value}"
    return f"no --{name}" if value is None else f"--{name} {value}"


def _cut_half_line(path: Path) -> None:
    """Removes what a kill has left of a line, to which Optuna would append, and checks the other lines."""
    with contextlib.suppress(FileNotFoundError), open(path, "r+b") as file:
        data = file.read()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            file.truncate(whole)
            os.fsync(file.fileno())
        for line in data[:whole].splitlines():
            json.loads(line)  # Optuna reads over a damaged line if it is the last, and fails when another follows


@contextlib.contextmanager
def _damage_as_user_error(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"{path} cannot be used: {error.strerror}") from None
    except (ValueError, LookupError, TypeError, AttributeError, AssertionError) as error:
        raise UserError(
            f"{path}, the journal of the search, is damaged ({first_line(error)}); --overwrite_output_dir starts over"
        ) from None


def done(study: optuna.Study) -> int:
    """Trials that need not be repeated: trained to the end, or stopped because they were worse than others."""
    return len(study.get_trials(deepcopy=False, states=_DONE))


def retry_unfinished(study: optuna.Study) -> list[int]:
    """Marks trials that were running when the search ended as failed, and queues their values; returns those queued.

    Values with which the process was killed three times, perhaps for its memory, are left alone.
    """
    trials = study.get_trials(deepcopy=False)
    retried = {trial.user_attrs.get(_RETRIED) for trial in trials}
    found = [trial for trial in trials if _is_unfinished(trial) and trial.number not in retried]
    queued = []
    for trial in found:
        interrupted = trial.user_attrs.get(OUTCOME) == INTERRUPTED
        attempt = trial.user_attrs.get(_ATTEMPT, 1) + (not interrupted)
        if trial.params and attempt <= _ATTEMPTS:
            kept = {name: value for name, value in trial.user_attrs.items() if name == GIVEN}
            study.enqueue_trial(trial.params, user_attrs={**kept, _RETRIED: trial.number, _ATTEMPT: attempt})
            queued.append(trial.number)
        if not trial.state.is_finished():
            study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
    return queued


def _is_unfinished(trial: Any) -> bool:
    if trial.state == optuna.trial.TrialState.FAIL:  # Optuna marks those so that Ctrl-C has ended
        return bool(trial.user_attrs.get(OUTCOME, INTERRUPTED) == INTERRUPTED)
    return bool(trial.state == optuna.trial.TrialState.RUNNING)


def make_sampler(space: Space, trials: int, seed: int) -> Any:
    """Optuna's TPE, after a third of the trials at random; few combinations are drawn without repetition instead.

    `seed` must be another one each time a search continues, or the same values would be drawn again.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        if space.size is not None and space.size <= _FEW * trials:
            return optuna.samplers.BruteForceSampler(seed=seed)
        return optuna.samplers.TPESampler(seed=seed, n_startup_trials=min(10, max(4, trials // 3)))


class _BeforeTheEnd(optuna.pruners.BasePruner):  # type: ignore[misc]
    """Another pruner's decision, except at the end of training: stopping a trial there would save nothing and lose its score."""

    def __init__(self, pruner: Any, end: int) -> None:
        self._pruner, self._end = pruner, end

    def prune(self, study: Any, trial: Any) -> bool:
        return trial.last_step != self._end and bool(self._pruner.prune(study, trial))


def make_pruner(after: int, end: int) -> Any:
    """Stops trials that are worse than the median of the others at the same point, once `after` have finished; 0: none."""
    if after == 0:
        return optuna.pruners.NopPruner()
    return _BeforeTheEnd(optuna.pruners.MedianPruner(n_startup_trials=after), end)
