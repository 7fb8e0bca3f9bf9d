"""The part of the Trainer that goes on after a rank was lost (`stoker launch --heal`): where it asks `Healing`."""

from __future__ import annotations

from typing import Any

from stoker.hf.checkpointing.checkpointing_trainer import CheckpointingTrainer
from stoker.hf.healing.healing import Healing

__all__ = ["HealingTrainer"]


class HealingTrainer(CheckpointingTrainer):
    """A Trainer that can leave its training loop and enter it again, with the state of another rank's memory."""

    healing: Healing

    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: Any = None,
        resume_from_checkpoint: str | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        named = {
            "batch_size": batch_size,
            "args": args,
            "resume_from_checkpoint": resume_from_checkpoint,
            "trial": trial,
            "ignore_keys_for_eval": ignore_keys_for_eval,
        }
        return self.healing.run(super()._inner_training_loop, named)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if not self.healing.loads_optimizer():
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if not self.healing.loads_random_state(checkpoint):
            super()._load_rng_state(checkpoint)
            self.healing.random_state_loaded()

    def _finalize_training(self, trial: Any, num_train_samples: Any, start_time: float) -> Any:
        return super()._finalize_training(trial, num_train_samples, self.healing.first_began(start_time))
