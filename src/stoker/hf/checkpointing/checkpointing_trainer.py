"""The part of the Trainer that writes checkpoints, resumes from them, and saves the model.

A checkpoint is complete or absent: it is written to a folder beside, sealed, and renamed. Everything overridden here calls
transformers' own method, so the layout and the contents are transformers'.
"""

from __future__ import annotations

import logging
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from stoker.distributed.agreement import barrier, from_first_rank, is_first_rank, once_per_machine
from stoker.distributed.lost_rank import is_joining
from stoker.errors import UserError, first_line
from stoker.hf.checkpointing import choice, command, folders, random_state, run_facts, same_run
from stoker.hf.checkpointing.interrupts import Interrupted, Interrupts
from stoker.hf.checkpointing.pending_evaluation import PendingEvaluation
from stoker.hf.checkpointing.restart import Start, accumulation_for_same_batch, newest_of_this_run
from stoker.hf.non_finite import require_finite_weights
from stoker.hf.publish import PublishingTrainer
from stoker.hf.ranks import Ranks
from stoker.requires import supported

__all__ = ["CheckpointingTrainer"]

log = logging.getLogger("stoker")


class CheckpointingTrainer(PublishingTrainer):
    """transformers.Trainer with complete checkpoints, exact resume, and an orderly end on a signal."""

    optimizer: Any
    control: Any
    ranks: Ranks
    resume_arguments: list[str] | None = None
    """Arguments of the `stoker` command that runs this Trainer; None in a script."""
    origin: run_facts.Facts | None = None
    """What `stoker train` adds to the facts of its checkpoints, from `same_run.origin_facts`; None in a script."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._interrupts = Interrupts()
        self._pending_evaluation = PendingEvaluation(self)
        self._data_facts: dict[str, Any] = {}
        self._training_random_state: random_state.RandomState | None = None
        """The generators' state in training, while an evaluation runs; None otherwise."""
        self._staged: Path | None = None
        """The folder in which a checkpoint is being written; None otherwise."""
        self._delayed_pushes: list[str] = []

    # Where to resume

    def resume_point(self) -> Path | None:
        """What `stoker train` resumes from: the requested checkpoint, or the newest one in a folder that was used before.

        With --overwrite_output_dir and no requested checkpoint, the old checkpoints are deleted. A collective.
        """
        if is_joining():
            return None
        folder, requested = Path(self.args.output_dir), self.args.resume_from_checkpoint
        if requested and str(requested).lower() not in {"true", "1", "yes"}:
            return choice.named(Path(requested))
        if self._starts_over and not requested and not Start.read(folder).again:
            self._once_per_machine(lambda: folders.remove_all(folder))
            return None
        self._once_per_machine(lambda: folders.tidy(folder))
        return self._newest_checkpoint(folder) if requested else choice.newest_usable(folder)

    def require_same_run(self, checkpoint: Path, *, requested: bool) -> None:
        """UserError if `checkpoint` belongs to another run than the one of `origin`, or leaves nothing to train. A collective.

        `requested`: the user has named it, and may have changed settings on purpose.
        """
        refusal = None
        if is_first_rank() and self.model is not None:
            data = run_facts.data_facts(self.train_dataset)
            now = {**run_facts.facts_of(self.model, data, self.args), **(self.origin or {})}
            refusal = same_run.why_not_continued(checkpoint, now, self.args, requested=requested)
        refusal = from_first_rank(refusal)
        if refusal is not None:
            raise UserError(refusal)

    def _checkpoint_to_resume(self, start: Start, requested: str | bool | None) -> Path | None:
        """After a restart the newest checkpoint of this run, otherwise the requested one. A collective."""
        folder = Path(self.args.output_dir)
        self._once_per_machine(lambda: folders.tidy(folder))
        self._data_facts = run_facts.data_facts(self.train_dataset)
        if is_joining():  # it continues from the memory of another rank
            return None
        checkpoint = self._after_restart(folder, start) if start.again else None
        if checkpoint is None and requested:
            checkpoint = self._newest_checkpoint(folder) if requested is True else choice.named(Path(requested))
        if checkpoint is not None:
            self._warn_of_differences(checkpoint)
        elif self._starts_over and not start.again and folders.all_checkpoints(folder) and self.is_world_process_zero():
            log.warning("overwrite_output_dir: the checkpoints in %s are not resumed from", folder)
        return checkpoint

    @property
    def _starts_over(self) -> bool:
        return bool(getattr(self.args, "overwrite_output_dir", None))

    def _newest_checkpoint(self, folder: Path) -> Path:
        checkpoint = choice.newest_usable(folder)
        if checkpoint is None:
            raise UserError(f"there is no checkpoint to resume from in {folder}")
        return checkpoint

    def _after_restart(self, folder: Path, start: Start) -> Path | None:
        checkpoint = newest_of_this_run(folder)
        if self.is_world_process_zero():
            how = f"resuming from {checkpoint}" if checkpoint else "this run has no checkpoint yet, so it starts over"
            log.warning("restarted%s; %s", start.reason, how)
        if checkpoint is not None:
            self._keep_global_batch_size(checkpoint)
        return checkpoint

    def _keep_global_batch_size(self, checkpoint: Path) -> None:
        """With another number of ranks, a step still takes as many examples: steps, epochs and rates keep their meaning."""
        before, args = run_facts.read(checkpoint).get("run", {}), self.args
        if before.get("processes", args.world_size) == args.world_size:
            return
        steps = accumulation_for_same_batch(before, args.per_device_train_batch_size, args.world_size)
        if steps is not None:
            args.gradient_accumulation_steps = steps
        elif self.is_world_process_zero():
            log.warning("the global batch of %s cannot be divided among %d processes: the number of examples per step changes",
                        checkpoint, args.world_size)  # fmt: skip

    def _warn_of_differences(self, checkpoint: Path) -> None:
        if self.model is None:
            return
        changed = run_facts.check(checkpoint, run_facts.facts_of(self.model, self._data_facts, self.args))
        if changed and self.is_world_process_zero():
            log.warning("%s is from a run with other settings, so this does not continue it exactly: %s",
                        checkpoint, "; ".join(changed))  # fmt: skip

    # Writing a checkpoint

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._staged) if self._staged is not None else str(super()._get_output_dir(trial))

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        require_finite_weights(self, together=True)
        folder = Path(self._get_output_dir(trial))
        target = folder / f"checkpoint-{self.state.global_step}"
        staged = folders.staging(folder, self.state.global_step)
        self._once_per_machine(lambda: shutil.rmtree(staged, ignore_errors=True))
        try:
            with folders.full_disk_as_user_error(folder, target, _size_of_checkpoint(self.model)):
                self._write_staged(model, trial, staged, target)
        except BaseException:
            shutil.rmtree(staged, ignore_errors=True)
            raise
        finally:
            self._staged = None
        while self._delayed_pushes:
            self._push_from_checkpoint(self._delayed_pushes.pop(0))
        if self._interrupts.on_any_rank():
            self._leave(target)

    def _write_staged(self, model: nn.Module, trial: Any, staged: Path, target: Path) -> None:
        self._staged = staged
        super()._save_checkpoint(model, trial)
        self._staged = None
        if self.args.should_save:
            self._complete(staged / target.name, target)
        barrier()
        self._once_per_machine(lambda: folders.publish_staged(staged, target))
        if self.args.should_save:
            best = self.state.best_model_checkpoint
            folders.rotate(target.parent, self.args.save_total_limit, [target, *([Path(best)] if best else [])])

    def _complete(self, written: Path, target: Path) -> None:
        """Adds what transformers could not know: where the best checkpoint is, and the facts of this run."""
        best = getattr(self.state, "best_global_step", None)
        if best is not None:
            # transformers looked for the best checkpoint beside the staged one, which is not where they are
            path = target.parent / f"checkpoint-{best}"
            if path == target or path.exists():
                self.state.best_model_checkpoint = str(path)
            self.state.save_to_json(str(written / "trainer_state.json"))
        if self.model is not None and self.train_dataset is not None:
            facts = {**run_facts.facts_of(self.model, self._data_facts, self.args), **(self.origin or {})}
            if self._pending_evaluation.due:
                facts["due"] = {"evaluation": True}
            run_facts.write(written, facts)

    def _seal_again(self) -> None:
        """After all on_save callbacks: some add files to the checkpoint, or rewrite its adapters."""
        if self.args.should_save and supported("Trainer: checkpoints"):
            folder = Path(self._get_output_dir(self._pending_evaluation.trial))
            folders.seal_again(folder / f"checkpoint-{self.state.global_step}")

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self._staged is not None:
            self._delayed_pushes.append(str(self._staged.parent / Path(checkpoint_folder).name))
            return
        try:
            super()._push_from_checkpoint(checkpoint_folder)
        except Exception as error:  # the hub's library, the network and the disk may raise anything
            log.warning("%s was not pushed to the hub: %s; training continues", checkpoint_folder, first_line(error))

    def _finalize_training(self, *args: Any, **named: Any) -> Any:
        # At the end transformers may delete all but the best checkpoint; here the newest stays too.
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            return super()._finalize_training(*args, **named)
        finally:
            self.args.save_total_limit = limit

    def _sorted_checkpoints(self, *args: Any, **named: Any) -> list[str]:
        # transformers 4 deletes the checkpoints that this names; here `folders.rotate` does.
        return []

    # What a checkpoint holds besides the weights

    def evaluation_loop(self, *args: Any, **named: Any) -> Any:
        # Evaluating must not advance the random numbers of training, or a resumed run that skips it would differ.
        self._training_random_state = random_state.current()
        try:
            with random_state.preserved():
                return super().evaluation_loop(*args, **named)
        finally:
            self._training_random_state = None

    def _evaluate(self, *args: Any, **named: Any) -> Any:
        metrics = super()._evaluate(*args, **named)
        self._pending_evaluation.due = False
        return metrics

    def _save_rng_state(self, output_dir: str) -> None:
        with random_state.preserved(self._training_random_state):
            # Loading a batch makes NumPy drop the normal number it keeps, so a checkpoint must not keep it either.
            random_state.use_numpy_generator(random_state.numpy_generator())
            super()._save_rng_state(output_dir)
        self.ranks.save(output_dir)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with choice.damage_as_user_error(checkpoint):
            super()._load_rng_state(checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with choice.damage_as_user_error(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and self.optimizer is not None:
            name = str(getattr(self.args.optim, "value", self.args.optim))
            run_facts.require_optimizer(Path(checkpoint), self.optimizer, name)
        self.ranks.load(checkpoint)

    def _load_best_model(self, *args: Any, **named: Any) -> None:
        best = Path(self.state.best_model_checkpoint)
        reason = choice.damaged_weights(best)
        if reason is None:
            super()._load_best_model(*args, **named)
        elif self.is_world_process_zero():
            log.warning(
                "the best model cannot be loaded: in %s, %s; the weights of the last step are kept", best, reason
            )

    # Saving the model

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        # Something may have changed the weights since the last step. Scripts may call it on rank 0 alone.
        require_finite_weights(self, together=False)
        of_checkpoint = _internal_call and output_dir is not None
        if of_checkpoint or self._staged is not None or not self.args.should_save or self.args.world_size > 1:
            super().save_model(output_dir, True)
        else:
            folder = Path(output_dir or self.args.output_dir)
            save = super().save_model
            with folders.full_disk_as_user_error(folder, folder / "model.safetensors", _size_of_checkpoint(self.model)):
                folders.put_in_place(folder, lambda beside: save(str(beside), True))
        if not _internal_call:
            self.publish("Model save")

    # The end

    def _leave(self, checkpoint: Path) -> None:
        received = self._interrupts.received
        assert received is not None
        self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)
        if self.is_world_process_zero():
            stopped = f"Stopped by {self._interrupts.name} after step {self.state.global_step}; saved {checkpoint}."
            how = command.how_to_resume(checkpoint, self.resume_arguments, self.args.world_size)
            print(stopped + how, file=sys.stderr, flush=True)
        raise Interrupted(received)

    def _once_per_machine(self, action: Callable[[], None]) -> None:
        once_per_machine(action, first_of_machine=self.is_local_process_zero())


def _size_of_checkpoint(model: nn.Module) -> int:
    """Bytes of the weights and Adam's two moments, roughly."""
    return 12 * sum(p.numel() for p in model.parameters()) + (1 << 20)
