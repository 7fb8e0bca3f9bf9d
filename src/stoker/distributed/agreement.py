"""Small values that all ranks agree on before they continue: a signal, the name of a checkpoint, the reason of a refusal.

Every function but the first two is a collective: all ranks must call it. With one process nothing is sent, and nothing by a
process that replaces a lost rank until it has joined the others: it agrees with itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from stoker.distributed import messages
from stoker.distributed.lost_rank import is_joining

__all__ = [
    "barrier",
    "from_all_ranks",
    "from_first_rank",
    "is_first_rank",
    "largest",
    "once_per_machine",
    "several_ranks",
]

Value = TypeVar("Value")


def several_ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def is_first_rank() -> bool:
    return not several_ranks() or dist.get_rank() == 0


def largest(number: int) -> int:
    """The largest `number` of all ranks. One small all-reduce, cheap enough for every step."""
    if not several_ranks() or is_joining():
        return number
    tensor = torch.tensor([number])
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return int(tensor.item())


def from_first_rank(value: Value) -> Value:
    """The `value` of rank 0, of a type that `messages.encode` takes."""
    if not several_ranks() or is_joining():
        return value
    found: Value = messages.broadcast(value, 0)
    return found


def from_all_ranks(value: Value) -> list[Value]:
    """The `value` of each rank, by rank, of a type that `messages.encode` takes."""
    if not several_ranks() or is_joining():
        return [value]
    return messages.all_gather(value)


def barrier() -> None:
    if several_ranks() and not is_joining():
        dist.barrier()


def once_per_machine(action: Callable[[], None], *, first_of_machine: bool) -> None:
    """Rank 0 performs `action`, then the first rank of every other machine, whose folder may be another; the rest wait."""
    if is_joining():  # done when the job began, and perhaps wrong now that the others are at work
        return
    if is_first_rank():
        action()
    barrier()
    if first_of_machine and not is_first_rank():
        action()
    barrier()
