"""The side of a Trainer that several processes need: how gradients meet, who gets which examples, who waited for whom.

`Ranks` belongs to one Trainer, which calls it at the moments that its methods are named after. With one process it does
nothing. The collectives themselves are `stoker.comm`'s.
"""

from __future__ import annotations

import functools
import logging
import time
from collections import Counter
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
from stoker.distributed.settings import without_use
from stoker.distributed.stragglers import Arrival, StepWait, Waiting
from stoker.hf.batches import lengths_of

if TYPE_CHECKING:
    from stoker.hf.trainer import Trainer

__all__ = ["BUCKET_MB", "Ranks", "averages_own_loss", "configure_ddp", "tokens_of", "without_ddp"]

log = logging.getLogger("stoker")

BUCKET_MB = 100
"""DDP's bucket on CPUs. Within a host 25 and 100 MB took the same time (docs/distributed.md); of two that are equal, the one
with fewer meetings of all ranks is the safer, because each waits for the slowest."""

_LENGTHS_READ = 50_000  # rows of a data set that does not know its lengths; reading more would delay the first step
_SLOW_SHARE, _SLOW_STEPS, _SLOW_TIME = 0.8, 10, 0.1  # the others waited for one rank: in so many steps, for so much
_SLOW_MEETINGS = 3  # fewer may be chance; with local SGD ranks meet every K steps only


class Ranks:
    """All that a Trainer does only because there are other processes."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.local: LocalSGD | None = None
        self.balanced: TokenBalancedSampler | None = None
        self.compressed: nn.Module | None = None
        """The wrapped model whose gradients travel compressed."""
        self._arrival: Arrival | None = None
        self._waiting: Waiting | None = None
        self._began = 0.0
        self._step_seconds: list[float] = []
        self._said_slow: set[int] = set()

    @property
    def several(self) -> bool:
        args = self.trainer.args
        return bool(args.world_size > 1) and args.device.type == "cpu"

    @property
    def _every(self) -> int:
        return int(getattr(self.trainer.args, "local_sgd", None) or 0) if self.several else 0

    # Before training

    def before_wrapping(self) -> None:
        """The model is about to be wrapped in DDP by accelerate."""
        if not self.several:
            return
        if self._every:
            without_ddp(self.trainer.accelerator)
        else:
            configure_ddp(self.trainer.accelerator, self.trainer.args.ddp_bucket_cap_mb)

    def train_begins(self) -> None:
        trainer, args = self.trainer, self.trainer.args
        compression = getattr(args, "gradient_compression", None) or "none"
        if not self.several:
            if asked := without_use(compression, getattr(args, "local_sgd", None)):
                log.warning("%s: without effect, for there is one process, or it is not on the CPU", asked)
            return
        model = trainer.model_wrapped
        self._waiting = Waiting()
        if self._every:
            wire = torch.bfloat16 if compression.startswith("bf16") else None
            self.local = LocalSGD(
                trainer.model, self._every, outer_lr=args.local_sgd_outer_lr,
                outer_momentum=args.local_sgd_outer_momentum, wire=wire,
            )  # fmt: skip
            self._load_local()
        elif isinstance(model, DistributedDataParallel):
            if not any(buffer.is_floating_point() for buffer in model.buffers()):
                model.broadcast_buffers = (
                    False  # constants such as position ids; sending them is a meeting in every step
                )
            if compression != "none" and self.compressed is not model:  # train() may be called again
                compress_gradients(model, compression)
                self.compressed = model
            self._arrival = Arrival(trainer.model)
        elif compression != "none" and trainer.is_world_process_zero():
            log.warning("gradient_compression %s: without effect, for the model is not in DDP", compression)

    def train_ends(self) -> None:
        if self._arrival is not None:
            self._arrival.remove()
        self._arrival = self._waiting = None

    # Batches

    def balance(self, loader: Any) -> Any:
        """The Trainer's own loader with the examples of each global batch dealt by tokens; as it is where that cannot be."""
        args, dataset = self.trainer.args, self.trainer.train_dataset
        self.balanced = None
        if not self.several or not getattr(args, "balance_tokens", True) or not self._pads_not():
            return loader
        shard = getattr(loader, "batch_sampler", None)
        order = getattr(getattr(shard, "batch_sampler", shard), "sampler", None)
        if type(order).__name__ != "SeedableRandomSampler":  # someone's own order, or none that ranks share
            return loader
        try:
            lengths = tokens_of(dataset, args.length_column_name)
        except (KeyError, TypeError, IndexError, ValueError):  # rows that are not tokens
            return loader
        if lengths is None:
            if self.trainer.is_world_process_zero():
                log.warning(
                    "batches are not balanced by tokens: the data set has neither `lengths` nor a column of them"
                )
            return loader
        self.balanced = TokenBalancedSampler(
            lengths.tolist(), args.train_batch_size, args.world_size, args.process_index,
            sampler=order, drop_last=args.dataloader_drop_last,
        )  # fmt: skip
        return torch.utils.data.DataLoader(
            loader.dataset, batch_sampler=self.balanced, collate_fn=loader.collate_fn, num_workers=loader.num_workers
        )

    def _pads_not(self) -> bool:
        """Whether the model computes real tokens only, so that tokens are what a batch costs."""
        return getattr(self.trainer.args, "use_ipex", None) is not False

    def loss_weight(self, position: int) -> float:
        """What this rank's loss counts in the micro-batch at `position` of the epoch."""
        return self.balanced.weight(position) if self.balanced is not None else 1.0

    # Steps

    def step_begins(self) -> None:
        self._began = time.perf_counter()

    def backward_ended(self) -> None:
        if self._arrival is not None and self._waiting is not None:
            self._waiting.add(time.perf_counter() - self._arrival.at)

    def meets(self, last: bool) -> bool:
        """Whether the ranks meet after this step: always with DDP; with local SGD where they average."""
        if self.local is None:
            return self.several
        self.local.steps += 1
        if not last and self.local.steps % self.local.every:
            return False
        self._average()
        return True

    def _average(self) -> None:
        assert self.local is not None
        self.local.average()
        if self._waiting is not None:
            self._waiting.add(self.local.waited)

    def step_ends(self) -> None:
        if self._waiting is not None:
            self._waiting.step()
            self._step_seconds.append(time.perf_counter() - self._began)

    def epoch_ends(self) -> None:
        """Evaluations and checkpoints at the end of an epoch are of weights that all agree on."""
        if self.local is not None and not self.local.agreed:
            self._average()

    # What is told

    def told(self) -> dict[str, float]:
        """Figures for the log; a collective."""
        if self._waiting is None or not self._step_seconds:
            return {}
        steps = self._waiting.take()
        seconds = sum(self._step_seconds) / len(self._step_seconds)
        self._step_seconds = []
        if not steps:
            return {}
        last = self.trainer.state.global_step
        rows = [[last - len(steps) + 1 + i, one.slowest, *one.waited] for i, one in enumerate(steps)]
        self.trainer.recorder.write("waits", step=last, seconds=round(seconds, 4), rows=rows)
        met = [one for one in steps if one.longest]  # between the averages of local SGD nobody waits for anybody
        if not met:
            return {"waited": 0.0}
        slowest, times = Counter(one.slowest for one in met).most_common(1)[0]
        lost = sum(sum(one.waited) for one in met) / len(steps) / len(steps[0].waited)
        self._complain(slowest, times, met, len(steps), seconds)
        return {"waited": round(lost, 4), "waited_for_rank": slowest}

    def _complain(self, slowest: int, times: int, met: list[StepWait], steps: int, seconds: float) -> None:
        longest = sum(one.longest for one in met) / steps
        many = steps >= _SLOW_STEPS and len(met) >= _SLOW_MEETINGS and times >= _SLOW_SHARE * len(met)
        if not many or longest < _SLOW_TIME * seconds or slowest in self._said_slow:
            return
        self._said_slow.add(slowest)
        if self.trainer.is_world_process_zero():
            log.warning(
                "rank %d holds the others up: they waited for it at %d of the last %d meetings, on average %.2f s of %.2f s per "
                "step; look at what else runs there", slowest, times, len(met), longest, seconds,
            )  # fmt: skip

    # Checkpoints

    def save(self, folder: str) -> None:
        """What differs between ranks under local SGD: every rank's optimizer has a state of its own."""
        if self.local is None:
            return
        Path(folder).mkdir(parents=True, exist_ok=True)
        state = {"optimizer": self.trainer.optimizer.state_dict(), "local": self.local.state_dict()}
        torch.save(state, self._file(Path(folder)))

    def load(self, folder: str | None) -> None:
        self._resumed_from = Path(folder) if folder else None

    _resumed_from: Path | None = None

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
            log.warning("%s is not there: rank %d goes on with the optimizer state of rank 0", path, self._rank)
        # There may be more ranks than before: they must count steps alike, and average from the same weights.
        self.local.follow_first_rank()

    @property
    def _rank(self) -> int:
        return int(self.trainer.args.process_index)

    def _file(self, folder: Path) -> Path:
        return folder / f"local_sgd_{self._rank}.pt"


def tokens_of(dataset: Any, column: str) -> NDArray[np.int64] | None:
    """Real tokens of every row; None where reading them all would take too long. Rows may have been padded beforehand."""
    names = getattr(dataset, "column_names", None) or ()
    if getattr(dataset, "lengths", None) is not None or column in names:
        return lengths_of(dataset, column)
    if hasattr(dataset, "with_format") and "attention_mask" in names:  # of the datasets library: a column at a time
        view = dataset.with_format("numpy", columns=["attention_mask"])
        parts = (view[i : i + 1000]["attention_mask"] for i in range(0, len(dataset), 1000))
        return np.fromiter((int(np.sum(row)) for part in parts for row in part), np.int64, len(dataset))
    if len(dataset) > _LENGTHS_READ:
        return None
    rows = (dataset[i] for i in range(len(dataset)))
    counts = (int(np.sum(row["attention_mask"])) if "attention_mask" in row else len(row["input_ids"]) for row in rows)
    return np.fromiter(counts, np.int64, len(dataset))


def configure_ddp(accelerator: Any, bucket_mb: float | None) -> None:
    """DDP as it is best on CPUs, unless the person has said otherwise."""
    from accelerate.utils import DistributedDataParallelKwargs

    handler = getattr(accelerator, "ddp_handler", None)
    if handler is None:
        handler = accelerator.ddp_handler = DistributedDataParallelKwargs()
    if handler.bucket_cap_mb == DistributedDataParallelKwargs().bucket_cap_mb:
        handler.bucket_cap_mb = bucket_mb or BUCKET_MB
    handler.gradient_as_bucket_view = True  # spares copying every gradient out of its bucket, and holding it twice


def without_ddp(accelerator: Any) -> None:
    """Models that `accelerator` prepares stay as they are: local SGD averages weights, not gradients."""
    if not isinstance(accelerator.prepare_model, functools.partial):
        accelerator.prepare_model = functools.partial(accelerator.prepare_model, evaluation_mode=True)


def averages_own_loss(model: nn.Module) -> bool:
    """Whether a model of transformers takes the mean over its own batch, whatever number of items it is told.

    transformers believes that every model whose forward takes keywords divides by that number, and so multiplies the loss
    of classifiers by the number of processes and of accumulated batches.
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
