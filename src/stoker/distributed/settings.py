"""How several processes train together: the words for it, which `stoker launch` hands on in the environment, and what they
may be. Trainer, Accelerator and the command line take the same ones and check them here. Imports no torch.
"""

from __future__ import annotations

import os
from typing import Any

from stoker.numbers import finite_number, whole_number

__all__ = ["COMPRESSIONS", "check_outer", "check_words", "from_environment", "without_use"]

COMPRESSIONS = ("none", "bf16", "bf16-feedback", "powersgd")


def from_environment(name: str, kind: Any) -> Any:
    """The word `name` as `stoker launch` was told it, as a `kind`; None if it was not."""
    text = os.environ.get(f"STOKER_{name.upper()}")
    if not text:
        return None
    readers = {int: whole_number, float: finite_number}
    value = readers[kind](text) if kind in readers else text
    if value is None:
        raise ValueError(f"STOKER_{name.upper()} is {text!r}, which is not a number; unset it, or correct it")
    return value


def check_words(compression: str | None, local_sgd: int | None, outer_lr: float, outer_momentum: float) -> None:
    if compression not in (None, *COMPRESSIONS):
        raise ValueError(f"gradient_compression is {compression!r}; choose one of {', '.join(COMPRESSIONS)}")
    if local_sgd is not None and local_sgd < 0:
        raise ValueError(f"local_sgd is {local_sgd}; it must be a number of steps, or 0 for none")
    if local_sgd and compression == "powersgd":
        raise ValueError(
            "gradient_compression powersgd cannot be had with local_sgd, which sends no gradients; use bf16"
        )
    check_outer(outer_lr, outer_momentum, "local_sgd_")


def check_outer(lr: float, momentum: float, prefix: str = "") -> None:
    if not 0 < lr < float("inf"):
        raise ValueError(f"{prefix}outer_lr is {lr}; it must be above 0 (1 is plain averaging, DiLoCo takes 0.7)")
    if not 0 <= momentum < 1:
        raise ValueError(
            f"{prefix}outer_momentum is {momentum}; it must be from 0 to below 1 (0 is none, DiLoCo takes 0.9)"
        )


def without_use(compression: str | None, local_sgd: int | None) -> str:
    """Which of the two were asked for, to be named where they do nothing; empty if none was."""
    asked = [f"local_sgd {local_sgd}"] if local_sgd else []
    asked += [f"gradient_compression {compression}"] if compression not in (None, "none") else []
    return " and ".join(asked)
