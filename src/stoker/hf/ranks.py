"""What a Trainer does only with several processes: averaging gradients or weights, balancing tokens, logging stragglers.

`Ranks` belongs to one Trainer, which calls its methods at the events they are named after. With one process it does nothing.
The algorithms are in `stoker.distributed`.
"""

from __future__ import annotations

import functools
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from stoker.distributed.balance import TokenBalancedSampler
from stoker.distributed.compression import compress_gradients
from stoker.distributed.local_sgd import LocalSGD
from stoker.distributed.settings import DistributedSettings
from stoker.distributed.stragglers import LastGradient, StragglerLog, WaitTimes
from stoker.hf.batches import lengths_of
from stoker.requires import require, supported

if TYPE_CHECKING:
    from stoker.hf.trainer import Trainer

__all__ = ["BUCKET_MB", "Ranks", "averages_own_loss", "configure_ddp", "tokens_of", "without_ddp"]

log = logging.getLogger("stoker")

NOT_IN_DDP = "%s is ignored: the model is not wrapped in DDP"

BUCKET_MB = 100
"""DDP's bucket size on CPUs. Within a host 25 and 100 MB took the same time (docs/distributed.md); of the two, 100 MB needs
fewer collectives, each of which waits for the slowest rank."""

LENGTHS_READ = 50_000  # rows of a dataset that does not know its lengths; reading more would delay the first step


class Ranks:
    """The other processes, as one Trainer sees them."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.local: LocalSGD | None = None
        self.balanced: TokenBalancedSampler | None = None
        self.compressed: nn.Module | None = None
        """The wrapped model whose gradients are sent compressed."""
        self._arrival: LastGradient | None = None
        self._waiting: WaitTimes | None = None
        self._began = 0.0
        self._step_seconds: list[float] = []
        self._straggler_log = StragglerLog()
        self._deferred: set[str] = set()
        """Flags of TrainerControl that wait for the next average of local SGD."""
        self._resumed_from: Path | None = None

    @property
    def several(self) -> bool:
        args = self.trainer.args
        return bool(args.world_size > 1) and args.device.type == "cpu"

    @property
    def _settings(self) -> DistributedSettings:
        return DistributedSettings.read(vars(self.trainer.args))

    # Before training

    def before_wrapping(self) -> None:
        """The model is about to be wrapped in DDP by accelerate."""
        if not self.several:
            return
        if self._settings.local_sgd:
            without_ddp(self.trainer.accelerator)
        else:
            configure_ddp(self.trainer.accelerator, self.trainer.args.ddp_bucket_cap_mb)

    def train_begins(self) -> None:
        trainer, settings = self.trainer, self._settings
        if not self.several:
            warn_of_ignored_settings(settings)
            return
        model = trainer.model_wrapped
        self._waiting = WaitTimes()
        if settings.local_sgd:
            self.local = LocalSGD.from_settings(trainer.model, settings)
            self._load_local()
        elif isinstance(model, DistributedDataParallel):
            if not any(buffer.is_floating_point() for buffer in model.buffers()):
                # Only constants such as position ids: sending them would cost a collective in every step.
                model.broadcast_buffers = False
            if settings.gradient_compression != "none" and self.compressed is not model:  # train() may be called again
                compress_gradients(model, settings.gradient_compression)
                self.compressed = model
            self._arrival = LastGradient(trainer.model)
        elif settings.gradient_compression != "none" and trainer.is_world_process_zero():
            log.warning(NOT_IN_DDP, settings)

    def train_ends(self) -> None:
        if self._arrival is not None:
            self._arrival.remove()
        self._arrival = self._waiting = None

    def leave_ddp(self) -> None:
        """The training loop was left after a failure; it will wrap the model again."""
        self.train_ends()
        self.compressed = None
        self._step_seconds = []

    # Batches

    def balance(self, loader: Any) -> Any:
        """The Trainer's own loader, with the examples of each global batch distributed by tokens where that is possible."""
        args, dataset = self.trainer.args, self.trainer.train_dataset
        self.balanced = None
        # Only if the model computes no padding is the number of tokens what a batch costs.
        computes_padding = getattr(args, "use_ipex", None) is False
        if not self.several or not getattr(args, "balance_tokens", True) or computes_padding:
            return loader
        shard = getattr(loader, "batch_sampler", None)
        order = getattr(getattr(shard, "batch_sampler", shard), "sampler", None)
        if type(order).__name__ != "SeedableRandomSampler":  # a custom order, or none that ranks share
            return loader
        try:
            lengths = tokens_of(dataset, args.length_column_name)
        except (KeyError, TypeError, IndexError, ValueError):  # its rows are not token ids
            return loader
        if lengths is None:
            if self.trainer.is_world_process_zero():
                log.warning(
                    "batches are not balanced by tokens: the dataset has neither `lengths` nor a column of them"
                )
            return loader
        self.balanced = TokenBalancedSampler(
            lengths.tolist(), args.train_batch_size, args.world_size, args.process_index,
            sampler=order, drop_last=args.dataloader_drop_last,
        )  # fmt: skip
        return torch.utils.data.DataLoader(
            loader.dataset, batch_sampler=self.balanced, collate_fn=loader.collate_fn, num_workers=loader.num_workers
        )

    # Steps

    def step_begins(self) -> None:
        self._began = time.perf_counter()

    def backward_ended(self) -> None:
        if self._arrival is not None and self._waiting is not None:
            self._waiting.add(time.perf_counter() - self._arrival.at)
        if self.local is not None and self.local.warms_up and self.trainer.accelerator.sync_gradients:
            self.local.average_gradients()
            self._count_wait()

    def step_ends(self, control: Any) -> bool:
        """Whether all ranks hold the same weights now: always with DDP; with local SGD where they have just averaged."""
        if self.local is None:
            agreed = True
        else:
            warms_up = self.local.warms_up
            agreed = self.local.step(last=control.should_training_stop)
            if agreed and not warms_up:
                self._count_wait()
            self._defer(control, agreed)
        if self._waiting is not None:
            self._waiting.step()
            self._step_seconds.append(time.perf_counter() - self._began)
        return agreed

    def _count_wait(self) -> None:
        if self._waiting is not None and self.local is not None:
            self._waiting.add(self.local.waited)

    def _defer(self, control: Any, agreed: bool) -> None:
        """Under local SGD, checkpoints and evaluations wait until all ranks hold the same weights."""
        wanted = {name for name in ("should_save", "should_evaluate") if getattr(control, name)}
        self._deferred |= wanted
        for name in self._deferred if agreed else wanted:
            setattr(control, name, agreed)
        if agreed:
            self._deferred = set()

    def epoch_ends(self) -> None:
        """Evaluations and checkpoints at the end of an epoch need weights that are the same on all ranks."""
        if self.local is not None and not self.local.agreed:
            self.local.average()
            self._count_wait()

    # Figures

    def figures(self) -> dict[str, float]:
        """How long ranks waited, and for which one, since the last call. A collective."""
        if self._waiting is None or not self._step_seconds:
            return {}
        steps = self._waiting.gather()
        seconds = sum(self._step_seconds) / len(self._step_seconds)
        self._step_seconds = []
        if not steps:
            return {}
        last = self.trainer.state.global_step
        rows = [[last - len(steps) + 1 + i, one.slowest, *one.waited] for i, one in enumerate(steps)]
        self.trainer.recorder.write("waits", step=last, seconds=round(seconds, 4), rows=rows)
        return self._straggler_log.figures(steps, seconds, warn=self.trainer.is_world_process_zero())

    # Checkpoints

    def save(self, folder: str) -> None:
        """Under local SGD each rank's optimizer has a state of its own."""
        if self.local is None:
            return
        Path(folder).mkdir(parents=True, exist_ok=True)
        state = {"optimizer": self.trainer.optimizer.state_dict(), "local": self.local.state_dict()}
        torch.save(state, self._file(Path(folder)))

    def load(self, folder: str | None) -> None:
        self._resumed_from = Path(folder) if folder else None

    def _load_local(self) -> None:
        folder, self._resumed_from = self._resumed_from, None
        if folder is None or self.local is None:
            return
        path = self._file(folder)
        if path.is_file():
            state = torch.load(path, map_location="cpu", weights_only=True)
            self.trainer.optimizer.load_state_dict(state["optimizer"])
            self.local.load_state_dict(state["local"])
        else:
            log.warning("%s is missing: this rank continues with the optimizer state of rank 0", path)
        # There may be more ranks than before: all need the same step count, and must average from the same weights.
        self.local.follow_first_rank()

    def _file(self, folder: Path) -> Path:
        return folder / f"local_sgd_{self.trainer.args.process_index}.pt"


def tokens_of(dataset: Any, column: str) -> NDArray[np.int64] | None:
    """Real tokens of every row, padded or not; None where reading them all would take too long."""
    names = getattr(dataset, "column_names", None) or ()
    if getattr(dataset, "lengths", None) is not None or column in names:
        return lengths_of(dataset, column)
    if hasattr(dataset, "with_format") and "attention_mask" in names:  # of the datasets library: read by column
        view = dataset.with_format("numpy", columns=["attention_mask"])
        parts = (view[i : i + 1000]["attention_mask"] for i in range(0, len(dataset), 1000))
        return np.fromiter((int(np.sum(row)) for part in parts for row in part), np.int64, len(dataset))
    if len(dataset) > LENGTHS_READ:
        return None
    rows = (dataset[i] for i in range(len(dataset)))
    counts = (int(np.sum(row["attention_mask"])) if "attention_mask" in row else len(row["input_ids"]) for row in rows)
    return np.fromiter(counts, np.int64, len(dataset))


def warn_of_ignored_settings(settings: DistributedSettings) -> None:
    if str(settings):
        log.warning("%s is ignored: it needs several processes on CPUs", settings)


def configure_ddp(accelerator: Any, bucket_mb: float | None) -> None:
    """Sets what is best for DDP on CPUs, unless the user has set it."""
    if not supported("DDP settings"):
        return
    from accelerate.utils import DistributedDataParallelKwargs

    handler = getattr(accelerator, "ddp_handler", None)
    if handler is None:
        handler = accelerator.ddp_handler = DistributedDataParallelKwargs()
    if handler.bucket_cap_mb == DistributedDataParallelKwargs().bucket_cap_mb:
        handler.bucket_cap_mb = bucket_mb or BUCKET_MB
    handler.gradient_as_bucket_view = True  # avoids copying every gradient out of its bucket, and storing it twice


def without_ddp(accelerator: Any) -> None:
    """Models that `accelerator` prepares stay as they are: local SGD averages weights, not gradients."""
    require("local SGD")  # else DDP would average the gradients as well
    if not isinstance(accelerator.prepare_model, functools.partial):
        accelerator.prepare_model = functools.partial(accelerator.prepare_model, evaluation_mode=True)


def averages_own_loss(model: nn.Module) -> bool:
    """Whether a transformers model averages the loss over its own batch, and ignores `num_items_in_batch`.

    transformers assumes that every model whose forward takes keyword arguments divides by that number, and so multiplies the
    loss of classifiers by the number of processes and of accumulated batches.
    """
    inner: Any = model
    if hasattr(model, "get_base_model"):  # PEFT's wrapper
        inner = inner.get_base_model()
    kind = type(inner)
    if not kind.__module__.startswith("transformers.models.") or hasattr(inner, "accepts_loss_kwargs"):
        return False
    forward: Any = kind.forward
    while hasattr(forward, "__wrapped__"):
        forward = forward.__wrapped__
    code = getattr(forward, "__code__", None)
    return code is not None and "loss_function" not in code.co_names
