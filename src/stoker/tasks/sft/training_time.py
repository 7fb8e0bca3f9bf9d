"""Estimates how long a training will take, from its arithmetic and the machine's measured rate."""

from __future__ import annotations

from typing import Any

import numpy as np

from stoker.english import counted
from stoker.hf.meter import Work
from stoker.machine.rates import Rates

__all__ = ["estimate_seconds", "rounded_duration"]

_SHARE = 0.5
"""Of the machine's peak that a training reaches, everything beside the products included."""


def estimate_seconds(work: Work, rates: Rates, lengths: Any, labelled: float, args: Any) -> float:
    """Seconds for all steps of all processes, each with its share of the cores, or with a machine of its own.

    `lengths` are the tokens of each row, `labelled` is the share of them that is trained on.
    """
    tokens = float(np.sum(lengths))
    pairs = float(np.sum(np.square(lengths, dtype=np.float64)))
    flops = work.per_token * tokens + work.per_label * tokens * labelled + work.per_pair * pairs
    epochs = args.num_train_epochs
    if args.max_steps > 0:
        rows = args.max_steps * args.gradient_accumulation_steps * args.train_batch_size * args.world_size
        epochs = rows / max(len(lengths), 1)
        if args.tokens_per_batch:
            epochs = (
                args.max_steps * args.gradient_accumulation_steps * args.tokens_per_batch * args.world_size / tokens
            )
    best = max(rates.bf16_all, rates.fp32_all) if args.bf16 else rates.fp32_all
    return float(flops * epochs / (1e9 * best * _SHARE))


def rounded_duration(seconds: float) -> str:
    """`less than a minute`, `about 12 minutes`, `about 3 hours`: an estimate deserves no more digits."""
    if seconds < 60:
        return "less than a minute"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"about {counted(minutes, 'minute')}"
    hours = seconds / 3600
    return f"about {hours:.1f} hours" if hours < 10 else f"about {hours:.0f} hours"
