"""Estimates the memory of a training step before it starts, and finds a batch size that fits.

Weights, gradients and Adam's two moments are exact. Activations are counted per token from what a fused layer keeps for
its backward pass. The peaks of BERT-base and MiniLM steps in docs/figures/train_step.json (benchmarks/train_step.py), stock and
optimised, are 13 to 20% below the estimate; a test checks this.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from stoker.errors import UserError
from stoker.kernels.frozen_parameter import stored_bytes
from stoker.model.recomputation import kept_values
from stoker.tasks.free_memory import available

__all__ = ["Estimate", "NotEnoughMemory", "check_memory", "estimate"]

_STOCK_SCORES = 4
"""Copies of the attention matrix that stock transformers keeps per head: scores, softmax, dropout mask and result."""
_BASE = 550 << 20  # Python, torch and transformers loaded, with their pools


class NotEnoughMemory(UserError):
    """The batches of a run do not fit into the memory that is free."""


@dataclass(frozen=True)
class Estimate:
    fixed: float
    """Bytes that do not depend on the batch."""
    per_token: float
    per_pair: float
    """Per pair of tokens in one padded row; 0 if attention matrices are not kept."""

    def bytes(self, lengths: NDArray[np.int64]) -> float:
        """The memory for a batch with rows of these lengths."""
        return self.fixed + self.per_token * float(lengths.sum()) + self.per_pair * float((lengths**2).sum())


def estimate(model: nn.Module, *, optimized: bool, bf16: bool = False) -> Estimate:
    weights = sum(map(stored_bytes, model.parameters()))
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    config: Any = model.config
    layers = getattr(config, "num_hidden_layers", None) or getattr(config, "n_layers", None) or 12
    heads = getattr(config, "num_attention_heads", None) or getattr(config, "n_heads", None) or 12
    kept = kept_values(config)
    # Weights, gradients, two moments; a checkpoint or an evaluation adds no copy of them.
    fixed = _BASE + weights + 12.0 * trained
    size = 2 if bf16 and optimized else 4
    if optimized:
        return Estimate(fixed, size * kept, 0.0)
    # Stock also keeps dropout masks and intermediate sums, all at the padded length.
    return Estimate(fixed, 1.2 * size * kept, size * layers * heads * _STOCK_SCORES)


def heaviest(lengths: NDArray[np.int64], size: int, *, tokens: bool, padded: bool) -> NDArray[np.int64]:
    """The row lengths of the largest batch of `size` rows, or tokens, that can occur: the longest rows together."""
    if not len(lengths):
        return lengths
    if tokens and not padded:
        longest = int(lengths.max())
        return np.array([longest] * (size // longest) + [size % longest], np.int64)
    rows = max(int(size / max(float(lengths.mean()), 1.0)), 1) if tokens else size
    largest = np.sort(lengths)[-rows:]
    return np.full(len(largest), largest.max()) if padded else largest


def check_memory(
    model: nn.Module,
    lengths: NDArray[np.int64],
    args: Any,
    *,
    optimized: bool,
    free: int | None = None,
    rows_at_once: int | None = None,
    less_memory: str | None = None,
) -> float:
    """The bytes that the largest batch needs. If they are not free, raises NotEnoughMemory with a batch size that fits.

    `rows_at_once`: how many rows of a batch are computed at once, if not all. `less_memory`: advice where smaller batches,
    accumulated, do not give the same updates.
    """
    free = available() if free is None else free
    need = estimate(model, optimized=optimized, bf16=args.bf16)
    tokens = bool(args.tokens_per_batch)
    size = args.tokens_per_batch if tokens else min(args.per_device_train_batch_size, rows_at_once or 1 << 30)
    ranks = max(int(os.environ.get("LOCAL_WORLD_SIZE") or args.world_size), 1)  # ranks that share this memory

    def bytes_of(batch: int) -> float:
        return need.bytes(heaviest(lengths, batch, tokens=tokens, padded=not optimized)) * ranks

    wanted = bytes_of(size)
    if free is None or wanted <= 0.95 * free:
        return wanted
    unit = "tokens" if tokens else "rows"
    finding = f"a batch of {size} {unit} needs about {wanted / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are free"
    # Only a divisor keeps the number of rows per update; a batch of tokens must fit the longest row.
    least = max(int(lengths.max(initial=1)), 1) if tokens else 1
    fitting = next((n for n in _smaller(size, least, tokens) if bytes_of(n) <= 0.9 * free), None)
    if fitting is None:
        raise NotEnoughMemory(
            f"{finding}; even one row does not fit; use a smaller model or shorter rows ({_length_option(args)})"
        )
    if tokens:
        raise NotEnoughMemory(f"{finding}; --tokens_per_batch {fitting} fits (--skip_memory_check tries it anyway)")
    if rows_at_once is not None:
        raise NotEnoughMemory(f"{finding}; --mini_batch_size {fitting} fits (--skip_memory_check tries it anyway)")
    if less_memory is not None:
        raise NotEnoughMemory(
            f"{finding}; --per_device_train_batch_size {fitting} fits; {less_memory} (--skip_memory_check tries it anyway)"
        )
    accumulation = args.gradient_accumulation_steps * (size // fitting)
    raise NotEnoughMemory(
        f"{finding}; --per_device_train_batch_size {fitting} --gradient_accumulation_steps {accumulation} "
        "fit and give the same updates (--skip_memory_check tries it anyway)"
    )


def _length_option(args: Any) -> str:
    return "--max_length" if hasattr(args, "max_length") else "--max_seq_length"


def _smaller(size: int, least: int, tokens: bool) -> list[int]:
    """Batches to try instead, the largest first."""
    if not tokens:
        return [one for one in range(size, 0, -1) if size % one == 0]
    halves = [size >> shift for shift in range(size.bit_length()) if size >> shift > least]
    return [*halves, least]
