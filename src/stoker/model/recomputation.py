"""Activation checkpointing only where memory is short.

A checkpointed layer computes its forward pass twice to save memory. TRL's trainers switch that on by default, although the
activations of a batch without padding often take a small part of the memory. With `keep_activations`, which the Trainer sets
for configurations that checkpoint by default, layers keep them as long as they fit in a quarter of the memory that was free at
the first step. Results are the same either way.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from stoker.machine import Machine

__all__ = ["keeping_activations", "kept_values"]

log = logging.getLogger("stoker")

_SHARE = 4
_KEPT_WIDTHS, _KEPT_INTERMEDIATE = 10, 3
"""Values kept per token and layer, in hidden and in intermediate widths: inputs and outputs of the products, q, k, v,
residuals, the temporary gradients of one layer; before, after and inside the activation."""

_BUDGETS: WeakKeyDictionary[nn.Module, float] = WeakKeyDictionary()
"""Bytes that the activations of a base model may take. Fixed at its first step: later ones find the memory of earlier ones
still mapped, and must not decide otherwise because of that."""


def kept_values(config: Any) -> int:
    """How many values the layers keep per token for the backward pass."""
    width = getattr(config, "hidden_size", None) or getattr(config, "dim", None) or 768
    layers = getattr(config, "num_hidden_layers", None) or getattr(config, "n_layers", None) or 12
    inner = getattr(config, "intermediate_size", None) or getattr(config, "hidden_dim", None) or 4 * width
    return int(layers * (_KEPT_WIDTHS * width + _KEPT_INTERMEDIATE * inner))


@contextlib.contextmanager
def keeping_activations(model: nn.Module, tokens: int, itemsize: int) -> Iterator[None]:
    """Switches checkpointing off during a forward pass of `tokens` tokens, if their activations fit."""
    layers: list[Any] = [
        module for module in model.modules() if module.__dict__.get("gradient_checkpointing") and module is not model
    ]
    if not layers or not model.training or not _fit(model, tokens * itemsize * kept_values(model.config)):
        yield
        return
    for layer in layers:
        layer.gradient_checkpointing = False
    try:
        yield
    finally:
        for layer in layers:
            layer.gradient_checkpointing = True


def _fit(model: nn.Module, need: float) -> bool:
    if model not in _BUDGETS:
        free = free_memory()
        _BUDGETS[model] = budget = free / _SHARE
        if need <= budget:
            log.warning(
                "activations are kept instead of being computed twice (gradient_checkpointing): they take %.1f GB of %.1f GB "
                "free memory; batches that take more than a quarter of it are still checkpointed (logged once)",
                need / 1e9,
                free / 1e9,
            )
    return need <= _BUDGETS[model]


def free_memory() -> float:
    """Bytes of memory that are free for this process, if all processes of this machine's job take an equal part; 0: unknown."""
    return (Machine.read().free_memory or 0) / max(int(os.environ.get("LOCAL_WORLD_SIZE") or 1), 1)
