"""Which type activations have. Parameters keep the type they have, fp32 as a rule: they are the master weights."""

from __future__ import annotations

import functools
import time

import torch

__all__ = ["activations", "bf16_gain", "choose", "has_bf16_units"]

_WORTHWHILE = 1.15  # below this, fp32's three more digits are worth more


def choose(dtype: torch.dtype | None) -> tuple[torch.dtype | None, str]:
    """What `optimize(dtype=...)` means on this machine, and why; raises ValueError for a type that cannot be trained in."""
    if dtype is None:
        if has_bf16_units():
            gain = bf16_gain()
            if gain >= _WORTHWHILE:
                return torch.bfloat16, f"bf16 activations: products measured {gain:.1f} times as fast as in fp32"
            return None, f"fp32: products in bf16 measured only {gain:.2f} times as fast"
        return None, "fp32: this CPU has no bf16 units (bf16 under autocast or with dtype=torch.bfloat16)"
    if dtype == torch.float16:
        raise ValueError(
            "optimize: dtype is torch.float16; fp16 training needs loss scaling and has no fast path on CPUs, "
            "use dtype=torch.bfloat16 or torch.float32"
        )
    if dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"optimize: dtype is {dtype}; it must be None, torch.float32 or torch.bfloat16")
    return dtype, "fp32, as asked" if dtype == torch.float32 else "bf16 activations, fp32 master weights, as asked"


def has_bf16_units() -> bool:
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, probe, bool)() for probe in probes)


@functools.cache
def bf16_gain() -> float:
    """How many times faster a product is in bf16 than in fp32, by what `stoker doctor` measured or a fifth of a second now."""
    from stoker.machine import rates
    from stoker.machine.facts import this_machine

    known = rates.known(this_machine())
    if known is not None:
        return known.bf16_all / known.fp32_all
    best = {}
    for dtype in (torch.float32, torch.bfloat16):
        # A generator of its own: measuring must not move the random numbers of the training.
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


def activations(asked: torch.dtype | None, parameters: torch.dtype) -> torch.dtype:
    """The type of activations in one call: as asked, else as autocast says, else that of the parameters."""
    if parameters != torch.float32:
        return parameters
    if asked is not None:
        return asked
    if torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16:
        return torch.bfloat16
    return parameters
