"""The evaluation that a signal kept from following its step: the checkpoint records it, the resumed run makes up for it.

Which model is the best, and whether early stopping ends the run, may depend on it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from stoker.distributed.agreement import largest
from stoker.hf.checkpointing import run_facts

if TYPE_CHECKING:
    from stoker.hf.checkpointing.checkpointing_trainer import CheckpointingTrainer

__all__ = ["PendingEvaluation"]


class PendingEvaluation:
    """Belongs to one Trainer; `due` is what a checkpoint written now has to record."""

    def __init__(self, trainer: CheckpointingTrainer) -> None:
        self._trainer = trainer
        self.due = False
        """The step just done has an evaluation to come."""
        self.nothing_left = False
        """No step is left to train."""
        self._checkpoint: Path | None = None
        self.trial: Any = None
        self._ignored_keys: list[str] | None = None

    def reset(self, checkpoint: Path | None, trial: Any, ignored_keys: list[str] | None) -> None:
        """Training is about to start, from `checkpoint` if there is one."""
        self.due = self.nothing_left = False
        self._checkpoint, self.trial, self._ignored_keys = checkpoint, trial, ignored_keys

    @property
    def resumes(self) -> bool:
        """Whether training starts from a checkpoint."""
        return self._checkpoint is not None

    def step_ended(self, args: Any, state: Any, control: Any) -> None:
        # With one evaluation per epoch, transformers asks for it only after the last step of the epoch has ended.
        by_epoch = args.eval_strategy == "epoch" and args.eval_delay <= state.epoch and state.epoch == int(state.epoch)
        self.due = control.should_evaluate or by_epoch

    def make_up(self) -> None:
        """Evaluates before the first step if the checkpoint says so. A collective."""
        if self._checkpoint is None:
            return
        trainer = self._trainer
        recorded = trainer.args.eval_strategy != "no" and run_facts.read(self._checkpoint).get("due")
        self.due = self.nothing_left = bool(largest(int(bool(recorded))))
        if self.due:
            trainer._load_rng_state(
                str(self._checkpoint)
            )  # transformers does so later; the checkpoint is rewritten now
            trainer.control.should_evaluate = trainer.control.should_save = True
            self.log_evaluate_and_save()
        # transformers would train one more step before it checks either of these.
        self.nothing_left &= trainer.control.should_training_stop  # by early stopping
        self.nothing_left |= trainer.state.global_step >= trainer.state.max_steps

    def log_evaluate_and_save(self, learning_rate: float | None = None) -> None:
        """What the callbacks have asked for after the last step, which had this `learning_rate`. A collective."""
        trainer = self._trainer
        loss = getattr(trainer, "_tr_loss", torch.tensor(0.0))  # before version 5 the loop keeps it to itself
        trainer._maybe_log_save_evaluate(
            loss, None, trainer.model_wrapped, self.trial, trainer.state.epoch, self._ignored_keys, 0.0,
            learning_rate=learning_rate,
        )  # fmt: skip
