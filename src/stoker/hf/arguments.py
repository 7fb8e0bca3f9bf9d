"""`TrainingArguments`: every argument of transformers', the retired ones with their old meaning, and Stoker's own.

A bf16 run or a run without a GPU uses the CPU without being told; `ddp_timeout` reaches the process group on CPUs too.
"""

import copy
import dataclasses
import logging
import math
import os
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

from stoker.distributed.settings import COMPRESSIONS, check_words, from_environment
from stoker.errors import UserError
from stoker.hf.ddp_backend import choose, join
from stoker.hf.retired import RETIRED, Retired

# No postponed annotations here: HfArgumentParser reads the types of these fields.

__all__ = ["InvalidArgument", "TrainingArguments"]

log = logging.getLogger("stoker")

_TODAY = {one.name for one in dataclasses.fields(transformers.TrainingArguments)}


class InvalidArgument(UserError, ValueError):
    """A ValueError, as transformers raises it; under `stoker launch` one sentence instead of a traceback."""


def _retired_field(row: Retired) -> tuple[str, Any, Any]:
    # A bool without a default of its own would need a value on the command line; these words were given bare.
    bare = {"nargs": "?", "const": True} if row.type is bool else {}
    metadata = {"help": f"Retired ({row.meant}): {row.now}.", **bare}
    return row.name, row.type | None, field(default=None, metadata=metadata)


_RetiredWords: Any = dataclasses.make_dataclass(
    "_RetiredWords", [_retired_field(row) for row in RETIRED if row.name not in _TODAY]
)
_DISTRIBUTED: tuple[tuple[str, Any, Any], ...] = (
    ("gradient_compression", str, None),
    ("local_sgd", int, None),
    ("local_sgd_outer_lr", float, 1.0),
    ("local_sgd_outer_momentum", float, 0.0),
)
_BACKENDS = ["nccl", "gloo", "mpi", "ccl", "xccl", "hccl", "cncl", "mccl"]


@dataclass
class TrainingArguments(_RetiredWords, transformers.TrainingArguments):  # type: ignore[misc]
    """transformers.TrainingArguments with the retired words, and with what Stoker adds."""

    ddp_backend: str | None = field(
        default=None, metadata={"help": "How processes talk to each other: gloo, ccl, mpi.", "choices": _BACKENDS}
    )
    tokens_per_batch: int | None = field(
        default=None,
        metadata={"help": "Form training batches of about this many tokens instead of a fixed number of rows."},
    )
    stop_on_nan: bool = field(
        default=True,
        metadata={
            "help": "Stop when the loss is NaN or infinite, and name the examples of that batch. "
            "Weights that are not finite are never saved."
        },
    )
    gradient_compression: str | None = field(
        default=None,
        metadata={
            "help": "How gradients travel between processes: bf16 (half the bytes), bf16-feedback (rounding errors are "
            "kept for the next step), powersgd (low rank), none.",
            "choices": list(COMPRESSIONS),
        },
    )
    local_sgd: int | None = field(
        default=None,
        metadata={"help": "Average the weights of the processes every so many steps instead of the gradients of each."},
    )
    local_sgd_outer_lr: float | None = field(
        default=None, metadata={"help": "How far to go towards the average (1.0; DiLoCo: 0.7)."}
    )
    local_sgd_outer_momentum: float | None = field(
        default=None, metadata={"help": "Nesterov momentum of the averages (0.0; DiLoCo: 0.9)."}
    )
    balance_tokens: bool = field(
        default=True, metadata={"help": "Deal each global batch so that every process gets about as many tokens."}
    )

    def __post_init__(self) -> None:
        _refuse_non_finite(self)
        said = [self._understand(row) for row in RETIRED if getattr(self, row.name, None) is not None]
        if not torch.accelerator.is_available():
            # Without this, transformers refuses bf16, and several processes started by mpirun would not find each other.
            self.use_cpu = True
        if self.use_cpu and self.fp16:
            said.append("fp16: CPUs train in fp32; bf16 saves memory")  # transformers ignores it without a word
        self._take_distributed_words()
        backend = self._choose_backend(said)
        if self.use_cpu:
            join(backend, self.ddp_timeout_delta)
            self.ddp_backend = None  # accelerate takes the group that exists, but refuses a name it does not know
        super().__post_init__()
        self.ddp_backend = backend
        # A rank is known from here on; the others need not repeat it.
        if self.process_index == 0:
            for line in filter(None, said):
                _say_once(line)

    def _understand(self, row: Retired) -> str:
        """Acts on one retired word, and tells what happens now."""
        value = getattr(self, row.name)
        if row.name in _TODAY:  # this version of transformers still acts on it
            return ""
        if row.renamed is not None:
            if row.type is not bool or value:
                setattr(self, row.renamed, value)
        elif row.name == "group_by_length" and value:
            self.train_sampling_strategy = "group_by_length"
        elif row.name == "warmup_ratio":
            if not 0 <= value <= 1:
                raise InvalidArgument(f"warmup_ratio is {value}; it must be a share of the steps, 0 to 1")
            if value and not getattr(self, "warmup_steps", 0):
                self.warmup_steps = min(value, math.nextafter(1.0, 0.0))  # 1 would be one step, not all of them
        elif row.name == "logging_dir":
            os.environ["TENSORBOARD_LOGGING_DIR"] = os.path.expanduser(value)
        elif row.name == "use_ipex" and not value:
            return "use_ipex=False: the model is left as it is"
        elif row.name == "overwrite_output_dir" and not value:
            return ""
        return f"{row.name}: {row.now}"

    def __getstate__(self) -> dict[str, Any]:
        """For training_args.bin, which is saved beside every model and may be published: no tokens."""
        return {name: None if name.endswith("_token") else value for name, value in self.__dict__.items()}

    def __deepcopy__(self, memo: dict[int, Any]) -> "TrainingArguments":
        same = type(self).__new__(type(self))
        memo[id(self)] = same
        same.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return same

    def __copy__(self) -> "TrainingArguments":
        same = type(self).__new__(type(self))
        same.__dict__.update(self.__dict__)
        return same

    def _take_distributed_words(self) -> None:
        """What `stoker launch` was told for scripts that do not know these words, then the defaults."""
        for name, kind, default in _DISTRIBUTED:
            if getattr(self, name) is None:
                told = from_environment(name, kind)
                setattr(self, name, default if told is None else told)
        assert self.local_sgd_outer_lr is not None
        assert self.local_sgd_outer_momentum is not None
        check_words(self.gradient_compression, self.local_sgd, self.local_sgd_outer_lr, self.local_sgd_outer_momentum)

    def _choose_backend(self, said: list[str]) -> str | None:
        if self.ddp_backend is None or not self.use_cpu:  # left to transformers
            return self.ddp_backend
        choice = choose(self.ddp_backend)
        said.append(choice.note or "")
        return choice.name

    @property
    def optimizes(self) -> bool:
        """Whether the Trainer applies `stoker.optimize`."""
        return getattr(self, "use_ipex", None) is not False


def _refuse_non_finite(args: TrainingArguments) -> None:
    """inf and NaN train nothing: weights become non-finite at the first step, or the run never ends."""
    for one in dataclasses.fields(TrainingArguments):
        value = getattr(args, one.name, None)
        if isinstance(value, float) and not math.isfinite(value):
            instead = "; 0 turns clipping off" if one.name == "max_grad_norm" else ""
            raise InvalidArgument(f"{one.name} is {value}; it must be a finite number{instead}")


_SAID: set[str] = set()
"""Cache of lines that were said in this process."""


def _say_once(line: str) -> None:
    if line not in _SAID:
        _SAID.add(line)
        log.warning("%s", line)
