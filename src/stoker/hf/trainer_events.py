"""The callback through which the parts of Stoker's Trainer follow training: clock, sampler, ranks, checkpoints, run log.

One callback for all of them, because their order within an event matters. The arguments are the trainer's own: SetFit's trainer
passes an object of another class to callbacks.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from transformers.trainer_callback import TrainerCallback

from stoker.hf.seeded_batches import BatchSeeds, seed_batches

if TYPE_CHECKING:
    from stoker.hf.trainer import Trainer

__all__ = ["TrainerEvents"]


class TrainerEvents(TrainerCallback):  # type: ignore[misc]
    """Runs after all other callbacks, so that it sees what they have requested."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self._optimizer_began = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **rest: Any) -> Any:
        trainer, args = self.trainer, self.trainer.args
        seeds = BatchSeeds(args.seed if args.data_seed is None else args.data_seed, args.process_index)
        trainer._batch_seeds = seed_batches(train_dataloader, seeds)
        trainer.ranks.train_begins()
        if not trainer.healing.keeps_optimizer:
            trainer.recorder.train_begins()
        if trainer._meter is not None:
            trainer._meter.take()  # loading and preparing is not training
        trainer.control = control
        pending = trainer._pending_evaluation
        if not trainer.healing.train_begins(resumed=pending.resumes):
            pending.make_up()
        return trainer.control

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        epoch = int(state.epoch or 0)
        self.trainer._position.epoch, self.trainer._position.epoch_began_at = epoch, state.global_step
        for batches in (self.trainer._batches, self.trainer.ranks.balanced, self.trainer._batch_seeds):
            if batches is not None:
                batches.set_epoch(epoch)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self.trainer.ranks.epoch_ends()
        self.trainer.healing.epoch_ended()
        if self.trainer._pending_evaluation.nothing_left and state.epoch == int(state.epoch):
            # No step was taken: the epoch before this one has been evaluated and saved.
            control.should_evaluate = control.should_save = False

    def on_step_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self.trainer._position.micro_batch = 0
        self.trainer.healing.step_begins()
        self.trainer.ranks.step_begins()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self.trainer.healing.before_optimizer_step()
        self._optimizer_began = time.perf_counter()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self.trainer.healing.after_optimizer_step()
        if self.trainer._meter is not None:
            self.trainer._meter.phases["optimizer"] += time.perf_counter() - self._optimizer_began

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self.trainer.healing.step_ended()
        if not self.trainer.ranks.step_ends(control):
            return
        self.trainer._pending_evaluation.step_ended(self.trainer.args, state, control)
        if self.trainer._interrupts.on_any_rank():
            control.should_save = True
            control.should_evaluate = False

    def on_save(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self.trainer._seal_again()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **rest: Any) -> None:
        self.trainer.recorder.logged(logs or {})

    def on_prediction_step(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        trainer = self.trainer
        if trainer._interrupts.received and trainer.is_in_train and trainer.args.world_size == 1:
            # An evaluation may take longer than the sender of the signal waits; the step before it is complete.
            trainer._save_checkpoint(trainer.model, None)
