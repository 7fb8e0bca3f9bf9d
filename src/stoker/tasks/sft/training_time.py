"""Estimates how long a training will take, from its rows, its cost (`stoker.hf.step_cost`) and the machine's measured rates."""

from __future__ import annotations

from typing import Any

from stoker.english import counted
from stoker.hf.step_cost import Rows, Speed, StepCost

__all__ = ["all_rows", "estimate_seconds", "rounded_duration"]


def estimate_seconds(cost: StepCost, speed: Speed, lengths: Any, labelled: float, args: Any) -> float:
    """Seconds of training. Each process computes its share of the rows at `speed`, that of its share of the cores.

    `lengths` are the tokens of each row, `labelled` is the share of them that is trained on.
    """
    if args.gradient_checkpointing:
        cost = cost.with_forward()
    return cost.seconds(all_rows(lengths, labelled, args), speed)


def all_rows(lengths: Any, labelled: float, args: Any) -> Rows:
    """What one process computes in the whole training."""
    epoch = Rows.of(lengths, labelled)
    if args.tokens_per_batch:
        per_epoch = epoch.tokens / (args.tokens_per_batch * args.world_size)
    else:
        per_epoch = len(lengths) / (args.train_batch_size * args.world_size)
    batches = args.num_train_epochs * per_epoch
    if args.max_steps > 0:
        batches = args.max_steps * args.gradient_accumulation_steps
    share = batches / max(per_epoch, 1e-9) / args.world_size
    return Rows(
        tokens=share * epoch.tokens,
        pairs=share * epoch.pairs,
        labelled=share * epoch.labelled,
        batches=batches,
        updates=batches / args.gradient_accumulation_steps,
    )


def rounded_duration(seconds: float) -> str:
    """`less than a minute`, `about 12 minutes`, `about 3 hours`: an estimate deserves no more digits."""
    if seconds < 60:
        return "less than a minute"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"about {counted(minutes, 'minute')}"
    hours = seconds / 3600
    return f"about {hours:.1f} hours" if hours < 10 else f"about {hours:.0f} hours"
