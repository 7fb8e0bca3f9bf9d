"""`TrainingArguments`: every argument of transformers', the retired ones with their old meaning, and Stoker's own.

A run without a GPU uses the CPU without a flag; `ddp_timeout` applies to the process group on CPUs too.
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

from stoker.distributed.settings import DistributedSettings
from stoker.errors import UserError
from stoker.hf.ddp_backend import choose, join
from stoker.hf.retired import RETIRED, Retired
from stoker.requires import drop_unsupported

# No postponed annotations here: HfArgumentParser reads the types of these fields.

__all__ = ["InvalidArgument", "TrainingArguments"]

log = logging.getLogger("stoker")

_TODAY = {one.name for one in dataclasses.fields(transformers.TrainingArguments)}


class InvalidArgument(UserError, ValueError):
    """A ValueError, as transformers raises it; `stoker launch` prints its message without a traceback."""


def _retired_field(row: Retired) -> tuple[str, Any, Any]:
    # Without `nargs`, a bool that defaults to None would need a value on the command line; these were bare flags.
    bare = {"nargs": "?", "const": True} if row.type is bool else {}
    metadata = {"help": f"Retired ({row.meant}): {row.now}.", **bare}
    return row.name, row.type | None, field(default=None, metadata=metadata)


def _distributed_field(setting: dataclasses.Field[Any]) -> tuple[str, Any, Any]:
    """None, the default, stands for the value that `stoker launch` was given."""
    text = setting.metadata["help"]
    metadata = {**setting.metadata, "help": f"{text[0].upper()}{text[1:]}."}
    return setting.name, type(setting.default) | None, field(default=None, metadata=metadata)


_DerivedArguments: Any = dataclasses.make_dataclass(
    "_DerivedArguments",
    [_retired_field(row) for row in RETIRED if row.name not in _TODAY]
    + [_distributed_field(setting) for setting in dataclasses.fields(DistributedSettings)],
)
_BACKENDS = ["nccl", "gloo", "mpi", "ccl", "xccl", "hccl", "cncl", "mccl"]


@drop_unsupported
@dataclass
class TrainingArguments(_DerivedArguments, transformers.TrainingArguments):  # type: ignore[misc]
    """transformers.TrainingArguments with the retired arguments, those of `DistributedSettings`, and Stoker's own."""

    ddp_backend: str | None = field(
        default=None,
        metadata={"help": "Communication backend between processes: gloo, ccl, mpi.", "choices": _BACKENDS},
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
    balance_tokens: bool = field(
        default=True,
        metadata={"help": "Divide each global batch so that all processes get about the same number of tokens."},
    )

    def __post_init__(self) -> None:
        _refuse_non_finite(self)
        notes = [self._apply_retired(row) for row in RETIRED if getattr(self, row.name, None) is not None]
        if not torch.accelerator.is_available():
            # Otherwise transformers refuses bf16, and processes started by mpirun would not form a group.
            self.use_cpu = True
        if self.use_cpu and self.fp16:
            notes.append("fp16 is ignored: CPUs train in fp32; bf16 saves memory")  # transformers gives no warning
        self._read_distributed_settings()
        backend = self.ddp_backend
        if self.use_cpu:
            if backend is not None:
                choice = choose(backend)
                backend = choice.name
                notes.append(choice.note or "")
            join(backend, self.ddp_timeout_delta)
            self.ddp_backend = None  # accelerate takes the group that exists, but refuses a name it does not know
        super().__post_init__()
        self.ddp_backend = backend
        if self.process_index == 0:  # known only now
            for line in filter(None, notes):
                _warn_once(line)

    def _apply_retired(self, row: Retired) -> str:
        """Gives a retired argument its old effect; returns the line for the user, if any."""
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
                raise InvalidArgument(f"warmup_ratio is {value}; it must be a fraction of the steps, 0 to 1")
            if value and not getattr(self, "warmup_steps", 0):
                self.warmup_steps = min(value, math.nextafter(1.0, 0.0))  # 1 would be one step, not all of them
        elif row.name == "logging_dir":
            os.environ["TENSORBOARD_LOGGING_DIR"] = os.path.expanduser(value)
        elif row.name == "use_ipex" and not value:
            return "use_ipex=False: the model is not optimised"
        elif row.name == "overwrite_output_dir":
            return ""  # the Trainer logs it where there are checkpoints that it does not use
        return f"{row.name}: {row.now}"

    def __getstate__(self) -> dict[str, Any]:
        """Without tokens: training_args.bin is saved with every model and may be published."""
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

    def _read_distributed_settings(self) -> None:
        """Takes over what `stoker launch` has put into the environment for scripts that do not have these options."""
        for name, value in dataclasses.asdict(DistributedSettings.read(vars(self))).items():
            # gradient_compression and local_sgd stay None where they are off: checkpoints record them so.
            if (getattr(self, name) is None and value not in ("none", 0)) or name.startswith("local_sgd_outer"):
                setattr(self, name, value)

    @property
    def optimizes(self) -> bool:
        """Whether the Trainer applies `stoker.optimize`."""
        return getattr(self, "use_ipex", None) is not False


def _refuse_non_finite(args: TrainingArguments) -> None:
    """With inf or NaN, weights become non-finite at the first step, or the run never ends."""
    for one in dataclasses.fields(TrainingArguments):
        value = getattr(args, one.name, None)
        if isinstance(value, float) and not math.isfinite(value):
            instead = "; 0 turns clipping off" if one.name == "max_grad_norm" else ""
            raise InvalidArgument(f"{one.name} is {value}; it must be a finite number{instead}")


WARNED: set[str] = set()
"""The warnings that this process has given."""


def _warn_once(line: str) -> None:
    if line not in WARNED:
        WARNED.add(line)
        log.warning("%s", line)
