"""The command of a search, and the commands that follow from it: those of its trials, and of the run that repeats one."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.command_options import options_of
from stoker.errors import UserError, one_line
from stoker.hf.checkpointing.command import program
from stoker.hf.secrets import without_secrets
from stoker.tasks import recipe
from stoker.tasks.file_patterns import expand
from stoker.tasks.tune.search_space import Space, default_search, parse_search

__all__ = ["BY_EVALUATION", "CONTENTS", "IGNORED", "SearchCommand", "SearchOptions"]

_IN_TRIALS: dict[str, Any] = {
    "overwrite_output_dir": None, "save_steps": None, "save_total_limit": None, "eval_steps": None, "eval_delay": None,
    "metric_for_best_model": None, "greater_is_better": None, "hub_model_id": None,
    "save_strategy": "no", "eval_strategy": "no", "load_best_model_at_end": False, "eval_on_start": False,
    "push_to_hub": False, "do_train": True, "do_eval": True, "do_predict": False,
}  # fmt: skip
"""Options about saving and evaluating, with their values in trials, which the search evaluates and which save no model."""
IGNORED = {
    "live": "`stoker watch` shows a trial, such as DIR/trial-001, while it trains",
    "resume_from_checkpoint": "a search continues by itself where it was stopped",
}
"""Options of `stoker train` that a search does not take, and what to do instead."""
_MAY_CHANGE = {
    "output_dir", "report_to", "logging_steps", "logging_strategy", "logging_dir", "run_name", "dataloader_num_workers",
    "preprocessing_num_workers", "overwrite_cache", "skip_memory_check", "live_port", "live_host", "disable_tqdm",
    *_IN_TRIALS, *IGNORED,
}  # fmt: skip
"""Options that do not change what a trial measures: a search may continue with others."""
_INSTEAD_OF = {"num_train_epochs": "max_steps", "per_device_train_batch_size": "tokens_per_batch"}
"""Options without effect if another one is given."""
BY_EVALUATION = ("reduce_lr_on_plateau", "greedy")
"""Schedules that follow the evaluations, of which a search makes others than the run that repeats a trial."""
CONTENTS = "contents"
"""The name of the hash of data and model in a search's identity."""


@dataclass(frozen=True)
class SearchOptions:
    """The options of `stoker tune` itself."""

    trials: int
    search: str | None = None
    seconds: float | None = None
    """After which no further trial is started; None: no limit."""
    metric: str | None = None
    direction: str | None = None
    evaluations: int = 4
    prune_after: int = 5


@dataclass(frozen=True)
class SearchCommand:
    task: str
    options: dict[str, Any]
    """Those of `stoker train`, by name."""
    search: SearchOptions
    space: Space

    @classmethod
    def of(cls, task: str, options: dict[str, Any], search: SearchOptions) -> SearchCommand:
        if not options.get("output_dir") or options["output_dir"] is True:
            raise UserError("--output_dir is missing; it names the folder for the search and its trials")
        return cls(task, options, search, _space(task, options, search.search))

    @property
    def folder(self) -> Path:
        return Path(str(self.options["output_dir"]))

    @property
    def wanted(self) -> int:
        """The number of trials: no more than there are combinations."""
        return min(self.search.trials, self.space.size or self.search.trials)

    @property
    def identity(self) -> dict[str, Any]:
        """What must be the same for trials to be comparable."""
        kept = {name: value for name, value in self.options.items() if name not in _MAY_CHANGE}
        shown = options_of(without_secrets(recipe.arguments(kept), instead=None))
        return {
            "task": self.task, "search": self.space.text, "metric": self.search.metric,
            "direction": self.search.direction, "evaluations": self.search.evaluations, "options": shown,
            CONTENTS: self._contents,
        }  # fmt: skip

    @property
    def _contents(self) -> str | None:
        """A hash of data and model, which may change under the same name; None if they are not local files."""
        from stoker.hf.checkpointing.same_run import digest_of

        files: list[Path] = []
        for name in ("train_file", "validation_file"):
            given = self.options.get(name) or []
            files += expand(list(map(str, given)) if isinstance(given, list) else [str(given)], f"--{name}")
        files += sorted(Path(str(self.options.get("model_name_or_path"))).glob("*.safetensors"))
        return digest_of(files)

    def check_space(self, check: Callable[[list[str]], object]) -> None:
        """Raises UserError if `check` does, or if the search is impossible, for one of the ends of the space."""
        for one in self.space.parameters:
            for value in one.extremes:
                if value in BY_EVALUATION:
                    raise UserError(
                        f"--search {one.name}={one.text}: {value} follows the evaluations, which are others in a search"
                    )
                try:
                    check(self.trial_arguments({one.name: value}, self.folder))
                except UserError as error:
                    raise UserError(f"--search {one.name}={one.text}: {one_line(error)}") from None

    def trial_arguments(self, values: dict[str, Any], folder: Path) -> list[str]:
        """The options with which a trial is trained."""
        options = {**self.options, **_IN_TRIALS, **values, "output_dir": str(folder)}
        return recipe.arguments({name: value for name, value in options.items() if name not in IGNORED})

    def train_arguments(self, values: dict[str, Any], folder: Path) -> list[str]:
        """The options of `stoker train` that repeat a trial in another folder."""
        kept = {name: value for name, value in self.options.items() if name not in (*IGNORED, "overwrite_output_dir")}
        return recipe.arguments({**kept, "do_train": True, "do_eval": True, **values, "output_dir": str(folder)})

    def train_command(self, values: dict[str, Any], folder: Path) -> str:
        return shlex.join(["stoker", "train", self.task, *without_secrets(self.train_arguments(values, folder))])

    @property
    def again(self) -> str:
        """The command that continues the search."""
        own = {field.name: getattr(self.search, field.name) for field in dataclasses.fields(self.search)}
        own["timeout"] = own.pop("seconds")
        defaults = {field.name: field.default for field in dataclasses.fields(self.search)}
        typed = {name: value for name, value in own.items() if value is not None and value != defaults.get(name)}
        kept = {name: value for name, value in self.options.items() if name != "overwrite_output_dir"}
        words = without_secrets(recipe.arguments({**kept, **typed}))
        return shlex.join([*program(), "tune", self.task, *words])


def _space(task: str, options: dict[str, Any], search: str | None) -> Space:
    """What is searched; UserError for options that contradict it."""
    kinds = {"full": bool(options.get("full")), "dpo": bool(options.get("dpo"))}
    useless = {one for one, other in _INSTEAD_OF.items() if options.get(other) not in (None, -1)}
    if search is None:
        space = parse_search(default_search(task, **kinds), task, **kinds)
        return Space(tuple(one for one in space.parameters if one.name not in useless))
    space = parse_search(search, task, **kinds)
    for one, other in _INSTEAD_OF.items():
        if one in space.names and (one in useless or other in space.names):
            raise UserError(
                f"--search {one} has no effect with --{other}, which takes its place; leave out one of them"
            )
    return space
