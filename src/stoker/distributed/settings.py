"""How several processes train together: each option's type, default, help and permitted values.

The flags of `stoker launch` (`stoker.launch.options`) and the fields of `TrainingArguments` (`stoker.hf.arguments`) are derived
from these declarations. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stoker.numbers import finite_number, whole_number

__all__ = ["DistributedSettings", "check_outer", "variable"]

COMPRESSIONS = ("none", "bf16", "bf16-feedback", "powersgd")


def _setting(default: Any, help: str, **rest: Any) -> Any:
    """A field whose metadata are keyword arguments of argparse's add_argument, as HfArgumentParser expects them."""
    return dataclasses.field(default=default, metadata={"help": help.format(default=default), **rest})


@dataclass(frozen=True, kw_only=True)
class DistributedSettings:
    """Raises ValueError for values that are not permitted."""

    gradient_compression: str = _setting(
        "none",
        "how gradients are sent: bf16 (half the bytes), bf16-feedback (rounding errors are added to the next step), "
        "powersgd (low rank), none",
        choices=COMPRESSIONS,
    )
    local_sgd: int = _setting(0, "average weights every K steps instead of gradients at every step", metavar="K")
    """0: gradients are averaged at every step."""
    local_sgd_outer_lr: float = _setting(
        1.0, "learning rate of the averages (default {default}; DiLoCo: 0.7)", metavar="X"
    )
    local_sgd_outer_momentum: float = _setting(
        0.0, "Nesterov momentum of the averages (default {default}; DiLoCo: 0.9)", metavar="X"
    )
    local_sgd_warmup_steps: int = _setting(
        0, "average gradients at every step for the first N steps (default {default})", metavar="N"
    )

    def __post_init__(self) -> None:
        compression = self.gradient_compression
        if compression not in COMPRESSIONS:
            raise ValueError(f"gradient_compression is {compression!r}; choose one of {', '.join(COMPRESSIONS)}")
        if self.local_sgd < 0:
            raise ValueError(f"local_sgd is {self.local_sgd}; it must be a number of steps, or 0 for none")
        if self.local_sgd and compression == "powersgd":
            raise ValueError(
                "gradient_compression=powersgd does not work with local_sgd, which sends no gradients; use bf16"
            )
        if self.local_sgd_warmup_steps < 0:
            raise ValueError(
                f"local_sgd_warmup_steps is {self.local_sgd_warmup_steps}; it must be a number of steps, or 0 for none"
            )
        check_outer(self.local_sgd_outer_lr, self.local_sgd_outer_momentum, "local_sgd_")

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> DistributedSettings:
        """The values of `given` that are not None, else those that `stoker launch` has put into the environment."""
        values = {
            field.name: _from_environment(field.name, type(field.default))
            if given.get(field.name) is None
            else given[field.name]
            for field in dataclasses.fields(cls)
        }
        return cls(**{name: value for name, value in values.items() if value is not None})

    def __str__(self) -> str:
        """The options that change how ranks train together, for messages; empty if they are off."""
        on = [f"local_sgd={self.local_sgd}"] if self.local_sgd else []
        on += [f"gradient_compression={self.gradient_compression}"] if self.gradient_compression != "none" else []
        return " and ".join(on)


def variable(name: str) -> str:
    """The environment variable by which `stoker launch` passes a setting to its ranks."""
    return f"STOKER_{name.upper()}"


def _from_environment(name: str, kind: type) -> Any:
    text = os.environ.get(variable(name))
    if not text:
        return None
    value = whole_number(text) if kind is int else finite_number(text) if kind is float else text
    if value is None:
        raise ValueError(f"{variable(name)} is {text!r}, which is not a number; unset it, or correct it")
    return value


def check_outer(lr: float, momentum: float, prefix: str = "") -> None:
    if not 0 < lr < float("inf"):
        raise ValueError(f"{prefix}outer_lr is {lr}; it must be above 0 (1 is plain averaging, DiLoCo takes 0.7)")
    if not 0 <= momentum < 1:
        raise ValueError(
            f"{prefix}outer_momentum is {momentum}; it must be from 0 to below 1 (0 is none, DiLoCo takes 0.9)"
        )
