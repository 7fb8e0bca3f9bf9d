"""`Trainer`: transformers' own, several times faster on CPUs, and hard to lose work with.

What it adds to transformers.Trainer: `stoker.optimize` before DDP wraps the model; tokens per second, padding avoided and
share of the measured peak in the logs; whole-or-absent checkpoints and exact resume; an orderly end at SIGTERM, Ctrl-C and
NaN. Everything it overrides calls transformers' method, so subclasses and callbacks work as they did.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers.trainer_utils import has_length

from stoker.errors import UserError, first_line
from stoker.hf.arguments import TrainingArguments
from stoker.hf.batches import EpochBatches, lengths_of
from stoker.hf.checkpointing import choice, command, folders, lock, run_facts
from stoker.hf.checkpointing.interrupts import Interrupted, Interrupts
from stoker.hf.checkpointing.restart import Start, checkpoint_to_go_on_from, steps_that_keep_the_batch
from stoker.hf.meter import Meter
from stoker.hf.publish import PublishingTrainer
from stoker.hf.ranks import Ranks, averages_own_loss
from stoker.hf.record import Recorder
from stoker.hf.watch import Watch
from stoker.model.sequences import counting

__all__ = ["NonFiniteLoss", "Trainer"]

log = logging.getLogger("stoker")


class NonFiniteLoss(UserError):
    """The loss, or the weights, became NaN or infinite; the message names step and examples."""


class Trainer(PublishingTrainer):
    """Use it wherever transformers.Trainer was used."""

    optimizer: Any
    control: Any
    padded_length: int | None = None
    """Length that stock would pad to, for the figure of padding avoided; None: the batch's own."""

    def __init__(self, model: Any = None, args: Any = None, *rest: Any, **named: Any) -> None:
        args = TrainingArguments("tmp_trainer") if args is None else args
        super().__init__(model, args, *rest, **named)
        self._optimized: nn.Module | None = None
        self._meter: Meter | None = None
        self._interrupts = Interrupts()
        self._batches: EpochBatches | None = None
        self._micro_step = 0
        self._epoch_began = (0, 0)
        """The epoch that is being computed, and the step before its first one here."""
        self._data_facts: dict[str, Any] = {}
        self._random_numbers: run_facts.RandomNumbers | None = None
        """Those of training, while an evaluation draws its own."""
        self._due = False
        """The step just done has an evaluation to come, which a checkpoint written now does not know of."""
        self._over = False
        """Nothing is left to train."""
        self._goes_on_from: Path | None = None
        self._asked: tuple[Any, Any] = (None, None)
        self._staged: Path | None = None
        self._pushes: list[str] = []
        self.resume_arguments: list[str] | None = None
        """Of the `stoker` command that runs this; None in a script."""
        self.recorder = Recorder(self)
        self.ranks = Ranks(self)
        if self.model is not None and averages_own_loss(self.model):
            self.model_accepts_loss_kwargs = False
        self._watch = Watch(self)
        self.add_callback(self._watch)

    # The model, optimised

    def _optimize(self, optimizer: Any = None) -> Any:
        """Applies `stoker.optimize` to the model (and optimizer) unless it was asked not to."""
        if getattr(self.args, "use_ipex", None) is False or self.args.device.type != "cpu":
            return optimizer
        from stoker.hf.accelerator import clip_in_one_pass
        from stoker.model import optimize
        from stoker.model.optimization_report import keep_switches, switches

        clip_in_one_pass(self.accelerator)
        own = switches(self.model)  # of a script that has called `optimize` itself
        kept = {} if own is None else {"unpad": own.unpad, "fuse": own.fuse, "fuse_loss": own.fuse_loss}
        self._optimized = self.model
        done = optimize(self.model, optimizer, dtype=self._precision(), **kept)
        keep_switches(self.model, own)  # another Trainer of this model may have other flags
        return None if optimizer is None else done[1]

    def _precision(self) -> torch.dtype | None:
        """What a script asked of `optimize` itself, else mixed precision's; None: the model's own, or autocast's."""
        from stoker.model.optimization_report import switches

        own = switches(self.model)
        if own is not None and own.dtype is not None:
            return own.dtype
        launch = getattr(self.args, "mixed_precision", None)  # of a launch; transformers 4 has only its autocast
        return torch.bfloat16 if self.args.bf16 or launch == "bf16" else None

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        super().create_optimizer(*([] if model is None else [model]))
        self.optimizer = self._optimize(self.optimizer)
        return self.optimizer

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> Any:
        if self._optimized is not self.model:
            self._optimize()
        wrapped = super()._wrap_model(model, training=training)
        if training:
            self.ranks.before_wrapping()
        return wrapped

    # Batches

    def get_train_dataloader(self) -> Any:
        tokens = getattr(self.args, "tokens_per_batch", None)
        similar = getattr(self.args, "train_sampling_strategy", "random") == "group_by_length"
        dataset = self.train_dataset
        stream = isinstance(dataset, torch.utils.data.IterableDataset)
        self._say_what_has_no_effect(tokens, similar, stream)
        if not (tokens or similar) or dataset is None or stream:
            loader = super().get_train_dataloader()
            return loader if similar or tokens else self.ranks.balance(loader)
        try:
            self._batches = EpochBatches(
                lengths_of(dataset, self.args.length_column_name),
                rows=None if tokens else self.args.train_batch_size,
                tokens=tokens,
                similar=similar,
                seed=self.args.seed if self.args.data_seed is None else self.args.data_seed,
                rank=self.args.process_index,
                world_size=self.args.world_size,
            )
        except ValueError as error:
            raise UserError(str(error)) from None
        collate = self._get_collator_with_removed_columns(self.data_collator, description="training")
        # Not prepared by accelerate: it would divide the batches among the processes a second time.
        return DataLoader(
            dataset, batch_sampler=self._batches, collate_fn=collate, num_workers=self.args.dataloader_num_workers
        )

    def _say_what_has_no_effect(self, tokens: int | None, similar: bool, stream: bool) -> None:
        if not self.is_world_process_zero():
            return
        if tokens and stream:
            log.warning(
                "tokens_per_batch: without effect, for an IterableDataset gives its rows in an order of its own"
            )
        elif (tokens or similar) and self.args.dataloader_drop_last:
            log.warning("dataloader_drop_last: without effect with %s, which leaves out no row",
                        "tokens_per_batch" if tokens else "group_by_length")  # fmt: skip

    def get_batch_samples(self, *args: Any, **named: Any) -> Any:
        if self._over:
            self.control.should_training_stop = True
            return [], None
        begin = time.perf_counter()
        samples = super().get_batch_samples(*args, **named)
        if self._meter is not None:
            self._meter.phases["data"] += time.perf_counter() - begin
        return samples

    # The step

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **named: Any) -> Any:
        meter = self._meter
        if meter is None:  # called by hand, outside of train()
            return super().training_step(model, inputs, *args, **named)
        meter.batch(inputs)
        begin, forward = time.perf_counter(), meter.phases["forward"]
        with counting(meter.positions):
            loss: torch.Tensor = super().training_step(model, inputs, *args, **named)
        self.ranks.backward_ended()
        meter.phases["backward"] += time.perf_counter() - begin - (meter.phases["forward"] - forward)
        if getattr(self.args, "stop_on_nan", True) and not bool(torch.isfinite(loss).all()):
            where = f"at step {self.state.global_step + 1}{self._examples_in_words()}"
            raise NonFiniteLoss(self._nan_sentence(f"the loss is {loss.mean().item()} {where}"))
        self._micro_step += 1
        return loss

    def compute_loss(self, *args: Any, **named: Any) -> Any:
        begin = time.perf_counter()
        result = super().compute_loss(*args, **named)
        if self._meter is None or not self.model.training:
            return result
        self._meter.phases["forward"] += time.perf_counter() - begin
        if (weight := self._loss_weight()) == 1.0 or isinstance(result, tuple):
            return result
        return result * weight

    def _loss_weight(self) -> float:
        """Makes the mean over ranks the mean over examples where the last batch of an epoch leaves ranks unequal."""
        if self.ranks.balanced is None or self.model_accepts_loss_kwargs or self.compute_loss_func is not None:
            return 1.0
        return self.ranks.loss_weight(self._epoch_and_position(len(self.ranks.balanced))[1])

    def _nan_sentence(self, finding: str) -> str:
        last = folders.last_good(Path(self._get_output_dir(None)))
        kept = f"the last good checkpoint is {last}" if last else "no checkpoint had been written"
        return f"{finding}; nothing of that step was saved, {kept}; try a lower --learning_rate"

    def _require_finite_weights(self, *, together: bool) -> None:
        """Raises unless all weights are finite; with `together` on all ranks, which must all call it, if on any of them."""
        bad = int(not _finite(self.model))
        if self._of_all(bad) if together else bad:
            found = f"the weights are no longer finite after step {self.state.global_step}"
            raise NonFiniteLoss(self._nan_sentence(found))

    def _examples_in_words(self) -> str:
        ids = self._current_examples()
        return f" (examples {', '.join(ids[:8])}{', ...' if len(ids) > 8 else ''})" if ids else ""

    def _current_examples(self) -> list[str]:
        """The ids of the examples in the batch being computed, found by going through the sampler again."""
        loader = self.callback_handler.train_dataloader
        sampler = getattr(loader, "batch_sampler", None)
        if sampler is None or not has_length(loader):
            return []
        epoch, position = self._epoch_and_position(len(loader))
        owners: tuple[Any, ...] = (loader, sampler, getattr(sampler, "sampler", None))
        try:
            for owner in owners:
                if hasattr(owner, "set_epoch"):
                    owner.set_epoch(epoch)
            indices: list[int] = next(islice(iter(sampler), position, None), [])
            name = getattr(self.train_dataset, "example_ids", None)
            return [str(one) for one in (name(indices) if name is not None else indices)]
        except Exception:  # whatever someone's sampler raises: what is told is the loss
            return []

    def _epoch_and_position(self, batches: int) -> tuple[int, int]:
        """Which micro-batch of which epoch is being computed."""
        accumulation = self.args.gradient_accumulation_steps
        epoch, before = self._epoch_began
        update = self.state.global_step - before
        if not self.args.ignore_data_skip:
            epoch, update = divmod(self.state.global_step, max(-(-batches // accumulation), 1))
        return epoch, update * accumulation + self._micro_step

    # Evaluation

    def evaluation_loop(self, *args: Any, **named: Any) -> Any:
        begin = time.perf_counter()
        # Evaluating must not move the random numbers of training, or a resumed run that skips one would differ.
        self._random_numbers = run_facts.random_numbers()
        try:
            with run_facts.aside():
                output = super().evaluation_loop(*args, **named)
        finally:
            self._random_numbers = None
        if self._meter is not None:
            self._meter.pause(time.perf_counter() - begin)
        return output

    def _evaluate(self, *args: Any, **named: Any) -> Any:
        metrics = super()._evaluate(*args, **named)
        self._due = False
        return metrics

    def _make_up_for_evaluation(self) -> None:
        """The evaluation that an interrupt kept from following the step of the checkpoint: the best model may depend on it."""
        checkpoint = self._goes_on_from
        if checkpoint is None:
            return
        known = self.args.eval_strategy != "no" and (run_facts.read(checkpoint) or {}).get("due")
        self._due = self._over = bool(self._of_all(int(bool(known))))
        if self._due:
            self._load_rng_state(str(checkpoint))  # transformers does so later; the checkpoint is written again here
            self.control.should_evaluate = self.control.should_save = True
            trial, ignored = self._asked
            self._maybe_log_save_evaluate(
                torch.tensor(0.0), None, self.model_wrapped, trial, self.state.epoch, ignored, 0.0
            )
        # transformers would take one more step before it looks.
        self._over &= self.control.should_training_stop  # by early stopping
        self._over |= self.state.global_step >= self.state.max_steps

    # Training, from checkpoint to checkpoint

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
        **named: Any,
    ) -> Any:
        start = Start.read(Path(self.args.output_dir))
        # Trials of a search may run side by side: each has a folder of its own.
        with self.only_run_in_folder(again=start.again) if trial is None else contextlib.nullcontext():
            return self._train_in_folder(start, resume_from_checkpoint, trial, ignore_keys_for_eval, **named)

    @contextlib.contextmanager
    def only_run_in_folder(self, *, again: bool = False) -> Iterator[None]:
        """Keeps other runs out of the output folder; UserError if one is there. All ranks must enter it.

        `again`: an agent has started the ranks again. The lock of a machine that has died may outlive it on a network file
        system, and must not end the run that goes on without that machine.
        """
        held, refusal = lock.Lock(None), None
        if self.is_world_process_zero():
            try:
                held = lock.take(Path(self.args.output_dir))
            except UserError as error:
                refusal = str(error)
        refusal = choice.of_first(refusal)
        if refusal is not None and not again:
            raise UserError(refusal)
        if refusal is not None and self.is_world_process_zero():
            log.warning("%s; this run was started again, so it goes on", refusal)
        try:
            yield
        finally:
            held.release()

    def _train_in_folder(
        self,
        start: Start,
        resume_from_checkpoint: str | bool | None,
        trial: Any,
        ignore_keys_for_eval: list[str] | None,
        **named: Any,
    ) -> Any:
        folder = Path(self.args.output_dir)
        self.in_turn(lambda: folders.tidy(folder))
        self._data_facts = run_facts.data_facts(self.train_dataset)
        checkpoint = self._after_restart(folder, start) or self._checkpoint_to_resume(folder, resume_from_checkpoint)
        self._meter = Meter.of(self.model, bf16=self._precision() == torch.bfloat16) if self.model is not None else None
        if self._meter is not None:
            self._meter.padded_length = self.padded_length
        self.recorder.begin(checkpoint, start.facts)
        self._due = self._over = False
        self._goes_on_from, self._asked = checkpoint, (trial, ignore_keys_for_eval)
        # Last, so that it knows what the others have asked for, and they have begun before it evaluates.
        self.callback_handler.callbacks.sort(key=lambda callback: callback is self._watch)
        try:
            with self._interrupts:
                output = super().train(str(checkpoint) if checkpoint else None, trial, ignore_keys_for_eval, **named)
            if getattr(self.args, "stop_on_nan", True):
                self._require_finite_weights(together=True)  # no loss has seen what the last step did
            self.recorder.end("finished")
            return output
        except BaseException as error:
            self.recorder.end(
                f"{type(error).__name__}: {error}" if not isinstance(error, Interrupted) else "interrupted"
            )
            raise
        finally:
            self.ranks.train_ends()
            self._meter = None
            # After an exception, too, this is no longer training: an evaluation by hand saves nothing and ends nothing.
            self._interrupts.received = None
            self.is_in_train = False

    def _after_restart(self, folder: Path, start: Start) -> Path | None:
        if not start.again:
            return None
        checkpoint = checkpoint_to_go_on_from(folder)
        if self.is_world_process_zero():
            how = f"going on from {checkpoint}" if checkpoint else "no checkpoint of this run, so from the start"
            why = f" ({start.times}) after a failure" if start.times else " because machines came or went"
            log.warning("started again%s; %s", why, how)
        if checkpoint is not None:
            self._keep_the_batch(checkpoint)
            self._say_what_differs(checkpoint)
        return checkpoint

    def _keep_the_batch(self, checkpoint: Path) -> None:
        """With other ranks than before, a step shall still take as many examples: then steps, epochs and rates mean the same."""
        before = (run_facts.read(checkpoint) or {}).get("run", {})
        args = self.args
        if before.get("processes", args.world_size) == args.world_size:
            return
        steps = steps_that_keep_the_batch(before, args.per_device_train_batch_size, args.world_size)
        if steps is not None:
            args.gradient_accumulation_steps = steps
        elif self.is_world_process_zero():
            log.warning("the batch of %s cannot be divided among %d processes: steps take another number of examples now",
                        checkpoint, args.world_size)  # fmt: skip

    def _checkpoint_to_resume(self, folder: Path, asked: str | bool | None) -> Path | None:
        if not asked:
            return None
        checkpoint = choice.newest_whole(folder) if asked is True else choice.named(Path(asked))
        if checkpoint is None:
            raise UserError(f"there is no checkpoint to resume from in {folder}")
        self._say_what_differs(checkpoint)
        return checkpoint

    def _say_what_differs(self, checkpoint: Path) -> None:
        if self.model is None:
            return
        changed = run_facts.check(checkpoint, run_facts.facts_of(self.model, self._data_facts, self.args))
        if changed and self.is_world_process_zero():
            log.warning("%s is from a run that differs, so this is not its exact continuation: %s",
                        checkpoint, "; ".join(changed))  # fmt: skip

    def _save_rng_state(self, output_dir: str) -> None:
        with run_facts.aside(self._random_numbers):
            super()._save_rng_state(output_dir)
        self.ranks.save(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with choice.damage_as_sentence(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and self.optimizer is not None:
            run_facts.require_optimizer(
                Path(checkpoint), self.optimizer, str(getattr(self.args.optim, "value", self.args.optim))
            )
        self.ranks.load(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with choice.damage_as_sentence(checkpoint):
            super()._load_rng_state(checkpoint)

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._staged) if self._staged is not None else str(super()._get_output_dir(trial))

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        begin = time.perf_counter()
        self._require_finite_weights(together=True)
        folder = Path(self._get_output_dir(trial))
        target = folder / f"checkpoint-{self.state.global_step}"
        staged = folders.staging(folder, self.state.global_step)
        self.in_turn(lambda: shutil.rmtree(staged, ignore_errors=True))
        try:
            self._write_staged(model, trial, staged, target)
        except BaseException as error:
            full = isinstance(error, Exception) and folders.disk_is_full(error, folder, _checkpoint_bytes(self.model))
            shutil.rmtree(staged, ignore_errors=True)
            if full:
                raise UserError(folders.disk_full_sentence(folder, target)) from None
            raise
        finally:
            self._staged = None
        while self._pushes:
            self._push_from_checkpoint(self._pushes.pop(0))
        if self._meter is not None:
            self._meter.pause(time.perf_counter() - begin)
        if self._interrupted():
            self._leave(target)

    def _write_staged(self, model: nn.Module, trial: Any, staged: Path, target: Path) -> None:
        self._staged = staged
        super()._save_checkpoint(model, trial)
        self._staged = None
        written = staged / target.name
        if self.args.should_save:
            best = getattr(self.state, "best_global_step", None)
            if best is not None:
                # transformers looked for the best checkpoint beside the one it wrote, which is not where they are
                path = target.parent / f"checkpoint-{best}"
                if path == target or path.exists():
                    self.state.best_model_checkpoint = str(path)
                self.state.save_to_json(str(written / "trainer_state.json"))
            if self.model is not None and self.train_dataset is not None:
                facts = run_facts.facts_of(self.model, self._data_facts, self.args)
                run_facts.write(written, {**facts, "due": {"evaluation": True}} if self._due else facts)
        self._wait_for_everyone()
        self.in_turn(lambda: _put_in_place(staged, target))
        if self.args.should_save:
            best_path = self.state.best_model_checkpoint
            keep = [target, *([Path(best_path)] if best_path else [])]
            folders.rotate(target.parent, self.args.save_total_limit, keep)

    def seal_again(self) -> None:
        """After everybody's on_save: some callbacks add to the checkpoint, or write its adapters anew."""
        if self.args.should_save:
            folder = Path(self._get_output_dir(self._asked[0]))
            folders.seal_again(folder / f"checkpoint-{self.state.global_step}")

    def _load_best_model(self, *args: Any, **named: Any) -> None:
        best = Path(self.state.best_model_checkpoint)
        if reason := choice.damaged_weights(best):
            if self.is_world_process_zero():
                log.warning(
                    "the best model cannot be loaded: in %s, %s; the weights of the last step are kept", best, reason
                )
            return
        super()._load_best_model(*args, **named)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self._staged is not None:
            self._pushes.append(str(self._staged.parent / Path(checkpoint_folder).name))
            return
        try:
            super()._push_from_checkpoint(checkpoint_folder)
        except Exception as error:  # whatever the hub's library, the network and the disk raise
            log.warning("%s was not pushed to the hub: %s; training goes on", checkpoint_folder, first_line(error))

    def _finalize_training(self, *args: Any, **named: Any) -> Any:
        # transformers ends with deleting all but the best checkpoint where one is to be kept; the newest stays here.
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            return super()._finalize_training(*args, **named)
        finally:
            self.args.save_total_limit = limit

    def _sorted_checkpoints(self, *args: Any, **named: Any) -> list[str]:
        # transformers 4 deletes what this names, at that end as well; here `folders.rotate` does.
        return []

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        # Whoever calls it, and whatever wrote into the weights since the last step. Scripts may call it on rank 0 alone.
        self._require_finite_weights(together=False)
        self._save_whole(output_dir, of_checkpoint=_internal_call and output_dir is not None)
        if not _internal_call:
            self.publish("Model save")

    def _save_whole(self, output_dir: str | None, of_checkpoint: bool) -> None:
        if of_checkpoint or self._staged is not None or not self.args.should_save or self.args.world_size > 1:
            super().save_model(output_dir, True)
            return
        folder = Path(output_dir or self.args.output_dir)
        try:
            folders.put_in_place(folder, lambda beside: super(Trainer, self).save_model(str(beside), True))
        except Exception as error:
            if folders.disk_is_full(error, folder, _checkpoint_bytes(self.model)):
                raise UserError(folders.disk_full_sentence(folder, folder / "model.safetensors")) from None
            raise

    # An orderly end

    def _leave(self, checkpoint: Path) -> None:
        received = self._interrupts.received
        assert received is not None
        self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)
        if self.is_world_process_zero():
            stopped = f"Stopped by {self._interrupts.name} after step {self.state.global_step}; saved {checkpoint}."
            print(stopped + self._how_to_go_on(checkpoint), file=sys.stderr, flush=True)
        raise Interrupted(received)

    def _how_to_go_on(self, checkpoint: Path) -> str:
        """In words for the screen; empty where the launcher of the ranks says it for all of them."""
        launch, count = command.launch(), self.args.world_size
        if launch is not None and launch.tells:
            return ""
        by_hand = count > 1 and (launch is None or launch.outer is not None)
        outer = f" by {launch.outer}" if launch is not None and launch.outer else ""
        started = f", started in {count} processes{outer} as before" if by_hand else ""
        return f"\nTo go on{started}:\n{command.resuming(checkpoint, self.resume_arguments)}"

    def _interrupted(self) -> bool:
        """Every rank must stop after the same step, whichever of them got the signal."""
        self._interrupts.received = self._of_all(self._interrupts.received or 0) or None
        return self._interrupts.received is not None

    def _of_all(self, number: int) -> int:
        """The largest that a rank has."""
        if self.args.world_size == 1:
            return number
        word = torch.tensor([number])
        torch.distributed.all_reduce(word, op=torch.distributed.ReduceOp.MAX)
        return int(word.item())

    def _wait_for_everyone(self) -> None:
        if self.args.world_size > 1:
            torch.distributed.barrier()

    def in_turn(self, action: Callable[[], None]) -> None:
        """Rank 0 does it, then the first rank of every other machine, whose folder may be another; the rest wait."""
        if self.is_world_process_zero():
            action()
        self._wait_for_everyone()
        if self.is_local_process_zero() and not self.is_world_process_zero():
            action()
        self._wait_for_everyone()

    def log(self, logs: dict[str, float], *args: Any, **named: Any) -> None:
        if self._meter is not None and "loss" in logs:
            logs.update(self._meter.take())
            logs.update(self.ranks.told())
        super().log(logs, *args, **named)


def _put_in_place(staged: Path, target: Path) -> None:
    # Machines that share a folder find it done by rank 0; those that do not hold their ranks' files only.
    if (staged / target.name).exists():
        folders.publish(staged / target.name, target)
        shutil.rmtree(staged, ignore_errors=True)


def _checkpoint_bytes(model: nn.Module) -> int:
    """Weights and Adam's two moments, roughly."""
    return 12 * sum(p.numel() for p in model.parameters()) + (1 << 20)


def _finite(model: nn.Module) -> bool:
    trained = [p.detach() for p in model.parameters() if p.requires_grad]
    # A sum is not finite if one of its terms is not; it reads each weight once and keeps nothing.
    if np.isfinite(sum(float(p.float().sum()) for p in trained)):
        return True
    return all(bool(torch.isfinite(p).all()) for p in trained)  # a sum of large weights may overflow by itself
