"""What Stoker's Trainer does between steps, as a callback: phases of the clock, epochs of the sampler, interrupts, the record."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from transformers.trainer_callback import TrainerCallback

if TYPE_CHECKING:
    from stoker.hf.trainer import Trainer

__all__ = ["Watch"]


class Watch(TrainerCallback):  # type: ignore[misc]
    """Between steps: phases of the clock, epochs of the sampler, interrupts, the record."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self._mark = 0.0
        self._held: set[str] = set()

    def on_train_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> Any:
        self.trainer.ranks.train_begins()
        self.trainer.recorder.train_begins()
        if self.trainer._meter is not None:
            self.trainer._meter.take()  # loading and preparing is not training
        self.trainer.control = control
        self.trainer._make_up_for_evaluation()
        return self.trainer.control

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self.trainer._epoch_began = (int(state.epoch or 0), state.global_step)
        for batches in (self.trainer._batches, self.trainer.ranks.balanced):
            if batches is not None:
                batches.set_epoch(int(state.epoch or 0))

    def on_epoch_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self.trainer.ranks.epoch_ends()
        if self.trainer._over and state.epoch == int(state.epoch):  # no epoch at all: the one before it is evaluated
            control.should_evaluate = control.should_save = False

    def on_step_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self.trainer._micro_step = 0
        self.trainer.ranks.step_begins()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self._mark = time.perf_counter()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        if self.trainer._meter is not None:
            self.trainer._meter.phases["optimizer"] += time.perf_counter() - self._mark

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        ranks = self.trainer.ranks
        meet = ranks.meets(last=control.should_training_stop)
        ranks.step_ends()
        if ranks.local is not None:
            self._hold(control, meet)
            if not meet:
                return
        # With one evaluation per epoch, its last step is followed by one that transformers has not thought of yet.
        epochs = args.eval_strategy == "epoch" and args.eval_delay <= state.epoch
        self.trainer._due = control.should_evaluate or (epochs and state.epoch == int(state.epoch))
        if self.trainer._interrupted():
            control.should_save = True
            control.should_evaluate = False

    def _hold(self, control: Any, meet: bool) -> None:
        """Under local SGD, what needs weights that all ranks agree on waits until they do: checkpoints and evaluations."""
        wanted = {name for name in ("should_save", "should_evaluate") if getattr(control, name)}
        self._held |= wanted
        for name in self._held if meet else wanted:
            setattr(control, name, meet)
        if meet:
            self._held = set()

    def on_save(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self.trainer.seal_again()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **rest: Any) -> None:
        self.trainer.recorder.logged(logs or {})

    def on_prediction_step(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        trainer = self.trainer
        if trainer._interrupts.received and trainer.is_in_train and args.world_size == 1:
            # An evaluation may take longer than whoever sent the signal waits; the step before it is complete.
            trainer._save_checkpoint(trainer.model, None)
