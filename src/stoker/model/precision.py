"""The type of the activations. Parameters keep theirs, usually fp32: they are the master weights.

Nothing depends on the machine unless `dtype="auto"` is given, so a script computes the same on every CPU.
"""

from __future__ import annotations

import functools
import time
from typing import Literal

import torch

from stoker.kernels.microkernels import torch_has_bf16_units
from stoker.machine import rates
from stoker.machine.facts import this_machine

__all__ = ["DtypeOption", "activations", "bf16_product_gain", "choose"]

DtypeOption = torch.dtype | Literal["auto"] | None
"""The values of `optimize(dtype=...)`."""


def choose(dtype: DtypeOption) -> tuple[torch.dtype | None, str]:
    """The type of activations that `dtype` requests (None: the model's own, or autocast's), and a line for the report.

    Raises ValueError for a type that cannot be used in training.
    """
    if dtype is None:
        return None, "fp32, the model's own; bf16 inside torch.autocast('cpu', torch.bfloat16)"
    if dtype == "auto":
        return _faster()
    if dtype == torch.float16:
        raise ValueError(
            "optimize: dtype is torch.float16; fp16 training needs loss scaling and has no fast path on CPUs, "
            "use dtype=torch.bfloat16 or torch.float32"
        )
    if dtype == torch.float32:
        return dtype, "fp32, as requested"
    if dtype == torch.bfloat16:
        return dtype, "bf16 activations, fp32 master weights, as requested"
    raise ValueError(f"optimize: dtype is {dtype!r}; it must be None, torch.float32, torch.bfloat16 or 'auto'")


def _faster() -> tuple[torch.dtype | None, str]:
    gain = rates.bf16_training_gain()
    if gain is None:
        if not torch_has_bf16_units():
            return None, "fp32, chosen by dtype='auto': this CPU has no bf16 units"
        gain = bf16_product_gain()
    if gain < rates.WORTHWHILE_GAIN:
        return None, f"fp32, chosen by dtype='auto': bf16 measured only {gain:.2f} times as fast"
    return torch.bfloat16, f"bf16 activations, chosen by dtype='auto': measured {gain:.1f} times as fast as fp32"


@functools.cache
def bf16_product_gain() -> float:
    """How many times as fast matrix products are in bf16 as in fp32: from `stoker doctor`, else measured now in 0.2 s."""
    known = rates.known(this_machine())
    if known is not None:
        return known.bf16_all / known.fp32_all
    best = {}
    for dtype in (torch.float32, torch.bfloat16):
        # a generator of its own, so that measuring does not change the random numbers of the training
        matrix = torch.randn(768, 768, generator=torch.Generator().manual_seed(0)).to(dtype)
        end = time.perf_counter() + 0.1
        seconds = [_time_product(matrix) for _ in range(3)]
        while time.perf_counter() < end:
            seconds.append(_time_product(matrix))
        best[dtype] = min(seconds)
    return best[torch.float32] / best[torch.bfloat16]


def _time_product(matrix: torch.Tensor) -> float:
    begin = time.perf_counter()
    matrix @ matrix
    return time.perf_counter() - begin


def activations(requested: torch.dtype | None, parameters: torch.dtype) -> torch.dtype:
    """The type of activations in one call: as requested, else autocast's, else that of the parameters."""
    if parameters != torch.float32:
        return parameters
    if requested is not None:
        return requested
    if torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16:
        return torch.bfloat16
    return parameters
