"""Which type activations have. Parameters keep the type they have, fp32 as a rule: they are the master weights."""

from __future__ import annotations

import torch

__all__ = ["activations", "choose", "has_bf16_units"]


def choose(dtype: torch.dtype | None) -> tuple[torch.dtype | None, str]:
    """What `optimize(dtype=...)` means on this machine, and why; raises ValueError for a type that cannot be trained in."""
    if dtype is None:
        if has_bf16_units():
            return torch.bfloat16, "bf16 activations: this CPU has bf16 units"
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


def activations(asked: torch.dtype | None, parameters: torch.dtype) -> torch.dtype:
    """The type of activations in one call: as asked, else as autocast says, else that of the parameters."""
    if parameters != torch.float32:
        return parameters
    if asked is not None:
        return asked
    if torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16:
        return torch.bfloat16
    return parameters
