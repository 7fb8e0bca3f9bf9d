"""`Trainer`: transformers' own, several times faster on CPUs, with checkpoints that survive crashes.

What it adds to transformers.Trainer: `stoker.optimize` before DDP wraps the model; tokens per second, padding avoided and
share of the measured peak in the logs; and, from its base class, complete checkpoints, exact resume, and an orderly end on
SIGTERM, Ctrl-C and NaN. Everything it overrides calls transformers' method, so subclasses and callbacks work as before.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.utils.data import DataLoader

from stoker.distributed.lost_rank import is_joining
from stoker.errors import UserError
from stoker.hf.arguments import TrainingArguments
from stoker.hf.batches import EpochBatches, Position
from stoker.hf.checkpointing import lock
from stoker.hf.checkpointing.interrupts import Interrupted
from stoker.hf.checkpointing.restart import Start
from stoker.hf.healing.healing import Healing
from stoker.hf.healing.healing_trainer import HealingTrainer
from stoker.hf.label_smoother import counts_items, labels_follow_for, smoother_for
from stoker.hf.meter import Meter
from stoker.hf.non_finite import NonFiniteLoss, require_finite_loss, require_finite_weights
from stoker.hf.ranks import Ranks, averages_own_loss
from stoker.hf.record import Recorder, loss_name
from stoker.hf.seeded_batches import BatchSeeds
from stoker.hf.trainer_events import TrainerEvents
from stoker.model.padding_readers import PaddingRead
from stoker.model.sequences import counting
from stoker.requires import drop_unsupported, require, supported
from stoker.run_report.log import PRUNED

__all__ = ["NonFiniteLoss", "Trainer"]

log = logging.getLogger("stoker")


@functools.partial(drop_unsupported, keep={"train"})
class Trainer(HealingTrainer):
    """Use it wherever transformers.Trainer was used."""

    padded_length: int | None = None
    """The length to which stock would pad, for the figure of padding avoided; None: the longest row of the batch."""
    report_position: Callable[[int], int] | None = None
    """Where a trial of a hyperparameter search reports the score after a step; None: at that step."""

    def __init__(self, model: Any = None, args: Any = None, *rest: Any, **named: Any) -> None:
        args = TrainingArguments("tmp_trainer") if args is None else args
        super().__init__(model, args, *rest, **named)
        self._optimized: nn.Module | None = None
        self._meter: Meter | None = None
        """None outside of train()."""
        self._batches: EpochBatches | None = None
        self._batch_seeds: BatchSeeds | None = None
        self._position = Position()
        self._flos_per_position: int | None = None
        self.recorder = Recorder(self)
        self.ranks = Ranks(self)
        self.healing = Healing(self)
        self.label_smoother: Any = smoother_for(self.label_smoother)
        if self.model is not None and averages_own_loss(self.model) and not counts_items(self.label_smoother):
            self.model_accepts_loss_kwargs = False
        self._events = TrainerEvents(self)
        self.add_callback(self._events)

    # Shown by help() and used by completion; the arguments of transformers' Trainer differ between its releases.
    __init__.__signature__ = inspect.signature(transformers.Trainer.__init__)  # type: ignore[attr-defined]

    # The model

    def _optimize(self, optimizer: Any = None) -> Any:
        """Applies `stoker.optimize` to the model (and optimizer) unless the arguments forbid it."""
        if getattr(self.args, "use_ipex", None) is False or self.args.device.type != "cpu":
            return optimizer
        from stoker.hf.accelerator import clip_in_one_pass
        from stoker.model import optimize
        from stoker.model.optimization_report import keep_switches, switches

        clip_in_one_pass(self.accelerator)
        own = switches(self.model)  # of a script that has called `optimize` itself
        kept = {} if own is None else {"unpad": own.unpad, "fuse": own.fuse, "fuse_loss": own.fuse_loss}
        self._optimized = self.model
        keep = own.keep_activations if own is not None else _checkpoints_by_default(self.args)
        done = optimize(self.model, optimizer, dtype=self._precision(), keep_activations=keep, **kept)
        keep_switches(self.model, own)  # another Trainer of this model may have other flags
        return None if optimizer is None else done[1]

    def _precision(self) -> torch.dtype | None:
        """What a script passed to `optimize` itself, else mixed precision's type; None: the model's own, or autocast's."""
        from stoker.model.optimization_report import switches

        own = switches(self.model)
        if own is not None and own.dtype is not None:
            return own.dtype
        launch = getattr(self.args, "mixed_precision", None)  # of a launch; transformers 4 has only its autocast
        return torch.bfloat16 if self.args.bf16 or launch == "bf16" else None

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        if self.healing.keeps_optimizer:
            return self.optimizer
        super().create_optimizer(*([] if model is None else [model]))
        self.optimizer = self._optimize(self.optimizer)
        return self.optimizer

    def create_scheduler(self, *args: Any, **named: Any) -> Any:
        from stoker.hf.accelerator import step_directly

        if self.args.device.type == "cpu":
            step_directly(self.optimizer)
        return super().create_scheduler(*args, **named)

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> Any:
        if self._optimized is not self.model:
            self._optimize()
        wrapped = super()._wrap_model(model, training=training)
        if training:
            self.ranks.before_wrapping()
            self.healing.before_wrapping()
        return wrapped

    # Batches

    def get_train_dataloader(self) -> Any:
        tokens = getattr(self.args, "tokens_per_batch", None)
        similar = getattr(self.args, "train_sampling_strategy", "random") == "group_by_length"
        dataset = self.train_dataset
        stream = isinstance(dataset, torch.utils.data.IterableDataset)
        self._warn_of_ignored_options(tokens, similar, stream)
        if not (tokens or similar) or dataset is None or stream:
            loader = super().get_train_dataloader()
            return loader if similar or tokens else self.ranks.balance(loader)
        try:
            self._batches = EpochBatches.from_arguments(self.args, dataset, tokens=tokens, similar=similar)
        except ValueError as error:
            raise UserError(str(error)) from None
        collate = self._get_collator_with_removed_columns(self.data_collator, description="training")
        # Not prepared by accelerate, which would divide the batches among the processes a second time.
        return DataLoader(
            dataset, batch_sampler=self._batches, collate_fn=collate, num_workers=self.args.dataloader_num_workers
        )

    def _warn_of_ignored_options(self, tokens: int | None, similar: bool, stream: bool) -> None:
        if not self.is_world_process_zero():
            return
        if tokens and stream:
            log.warning("tokens_per_batch is ignored: an IterableDataset determines the order of its rows itself")
        elif (tokens or similar) and self.args.dataloader_drop_last:
            log.warning("dataloader_drop_last is ignored with %s, which drops no rows",
                        "tokens_per_batch" if tokens else "group_by_length")  # fmt: skip

    def get_batch_samples(self, *args: Any, **named: Any) -> Any:
        if self._pending_evaluation.nothing_left:
            self.control.should_training_stop = True
            return [], None
        with contextlib.nullcontext() if self._meter is None else self._meter.phase("data"):
            return super().get_batch_samples(*args, **named)

    # The step

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **named: Any) -> Any:
        meter = self._meter
        if meter is None:  # called by hand, outside of train()
            return super().training_step(model, inputs, *args, **named)
        meter.batch(inputs)
        begin, forward = time.perf_counter(), meter.phases["forward"]
        with counting(meter.positions):
            loss: torch.Tensor = self._computed_step(model, inputs, *args, **named)
        self.ranks.backward_ended()
        meter.phases["backward"] += time.perf_counter() - begin - (meter.phases["forward"] - forward)
        if self._stops_on_nan:
            require_finite_loss(self, loss, self._position)
        self._position.micro_batch += 1
        return loss

    def _computed_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **named: Any) -> Any:
        try:
            return super().training_step(model, inputs, *args, **named)
        except PaddingRead:
            if self._position.micro_batch or self.args.world_size > 1:
                raise  # gradients of other batches have been added already, or are expected by other ranks
            model.zero_grad()
            return super().training_step(model, inputs, *args, **named)

    def compute_loss(self, *args: Any, **named: Any) -> Any:
        if self._meter is None or not self.model.training:
            return super().compute_loss(*args, **named)
        with self._meter.phase("forward"), labels_follow_for(self.label_smoother):
            result = super().compute_loss(*args, **named)
        if (weight := self._loss_weight()) == 1.0 or isinstance(result, tuple):
            return result
        return result * weight

    def _loss_weight(self) -> float:
        """Makes the mean over ranks the mean over examples where the last batch of an epoch leaves ranks unequal."""
        balanced = self.ranks.balanced
        if balanced is None or self.model_accepts_loss_kwargs or self.compute_loss_func is not None:
            return 1.0
        return balanced.weight(self._position.in_epoch(len(balanced), self.args, self.state.global_step)[1])

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """As in transformers, which counts the parameters of the model anew in every step."""
        ids = inputs.get(getattr(self.model, "main_input_name", "input_ids"))
        if self._meter is None or not isinstance(ids, torch.Tensor) or not ids.numel() or _counts_its_own(self.model):
            return int(super().floating_point_ops(inputs))
        if self._flos_per_position is None:
            self._flos_per_position = super().floating_point_ops(inputs) // ids.numel()
        return self._flos_per_position * ids.numel()

    @property
    def _stops_on_nan(self) -> bool:
        return bool(getattr(self.args, "stop_on_nan", True))

    # Time and figures

    def _not_training(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if self._meter is None else self._meter.paused()

    def evaluation_loop(self, *args: Any, **named: Any) -> Any:
        with self._not_training():
            return super().evaluation_loop(*args, **named)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        with self._not_training():
            super()._save_checkpoint(model, trial)

    def log(self, logs: dict[str, float], *args: Any, **named: Any) -> None:
        if self._meter is not None and loss_name(logs) is not None:
            logs.update(self._meter.take())
            logs.update(self.ranks.figures())
        super().log(logs, *args, **named)

    def _report_to_hp_search(self, trial: Any, step: int, metrics: dict[str, float]) -> None:
        super()._report_to_hp_search(trial, self.report_position(step) if self.report_position else step, metrics)

    # The run

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
        **named: Any,
    ) -> Any:
        if not supported("Trainer: checkpoints"):
            if resume_from_checkpoint:
                require("Trainer: checkpoints")
            return super().train(trial=trial, ignore_keys_for_eval=ignore_keys_for_eval, **named)
        folder = Path(self.args.output_dir)
        start = Start.read(folder)
        # Trials of a search may run side by side: each has a folder of its own.
        with lock.only_run_in(folder, restarted=start.again) if trial is None else contextlib.nullcontext():
            checkpoint = self._checkpoint_to_resume(start, resume_from_checkpoint)
            self._pending_evaluation.reset(checkpoint, trial, ignore_keys_for_eval)
            if self.model is not None:
                self._meter = Meter.of(self.model, bf16=self._precision() == torch.bfloat16)
                self._flos_per_position = None
                self._meter.padded_length = self.padded_length
            if not is_joining():  # else when it is known which step the others are at
                self.recorder.begin(checkpoint, start.facts)
            # Last, so that it sees what the others have requested, and they have begun before it evaluates.
            self.callback_handler.callbacks.sort(key=lambda callback: callback is self._events)
            with self._recorded():
                # A trial is not resumed from a checkpoint: the search repeats it.
                with self._interrupts if trial is None else contextlib.nullcontext():
                    output = super().train(
                        str(checkpoint) if checkpoint else None, trial, ignore_keys_for_eval, **named
                    )
                if self._stops_on_nan:
                    require_finite_weights(self, together=True)  # no loss was computed after the last step
                return output

    @contextlib.contextmanager
    def _recorded(self) -> Iterator[None]:
        """Writes to the run log how training ended."""
        try:
            yield
            self.recorder.end("finished")
        except (Interrupted, KeyboardInterrupt):
            self.recorder.end("interrupted")
            raise
        except BaseException as error:
            # Optuna, whose exception it is, need not be installed.
            pruned = type(error).__name__ == "TrialPruned"
            self.recorder.end(PRUNED if pruned else f"{type(error).__name__}: {error}")
            raise
        finally:
            self.ranks.train_ends()
            self._meter = None
            # After an exception, too, this is no longer training: a later evaluate() saves nothing and ends nothing.
            self._interrupts.received = None
            self.is_in_train = False


def _counts_its_own(model: Any) -> bool:
    """Whether this model does not count operations as transformers does: a number for each position of its input."""
    own = getattr(type(model), "floating_point_ops", None)  # of transformers 4, and of users' models
    return own is not None and own.__module__ != "transformers.modeling_utils"


def _checkpoints_by_default(args: Any) -> bool:
    """Whether activation checkpointing is the default of these arguments, as in TRL, and so not necessarily a wish."""
    field = type(args).__dataclass_fields__.get("gradient_checkpointing")
    return field is not None and field.default is True
