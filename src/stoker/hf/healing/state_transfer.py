"""Sends weights and optimizer state from the memory of one rank to all others, and compares them afterwards.

All ranks take the sender's state, those that had the same as well: then all have the same bits, whatever happened before.
"""

from __future__ import annotations

import hashlib
import zlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from stoker.distributed import messages
from stoker.distributed.agreement import from_all_ranks
from stoker.kernels.frozen_parameter import FrozenWeight

__all__ = ["StateDiffers", "require_same_state", "send_optimizer_state", "send_weights"]

_SMALL = 1024
"""Tensors with at most so many elements are sent with the description, not one by one."""


class StateDiffers(RuntimeError):
    """The ranks do not have the same model or the same state: training must not continue."""


@torch.no_grad()
def send_weights(model: nn.Module, sender: int) -> None:
    """All parameters and buffers. A collective.

    Frozen weights in few bits are left out: every process has read the same files.
    """
    named = [*model.named_parameters(), *model.named_buffers()]
    tensors = [(name, tensor) for name, tensor in named if not isinstance(tensor, FrozenWeight)]
    shapes = repr([(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors])
    if len(set(from_all_ranks(hashlib.sha256(shapes.encode()).hexdigest()))) > 1:
        raise StateDiffers("the model of the new process has other parameters than that of the other ranks")
    for _, tensor in tensors:
        _send_tensor(tensor, sender)


@torch.no_grad()
def send_optimizer_state(optimizer: Any, sender: int) -> dict[int, dict[str, Any]]:
    """The sender's state of each parameter, by its number in the optimizer. A collective."""
    state = optimizer.state_dict()["state"] if dist.get_rank() == sender else {}
    shown = [(key, name, *_description(value)) for key, values in state.items() for name, value in values.items()]
    found: dict[int, dict[str, Any]] = {}
    for key, name, value, shape in messages.broadcast(shown, sender):
        if shape is not None:  # `value` has the tensor's type, and none of its elements
            value = state[key][name].contiguous() if state else torch.empty(shape, dtype=value.dtype)
            dist.broadcast(value, sender)
        found.setdefault(key, {})[name] = value
    return found


def _description(value: Any) -> tuple[Any, tuple[int, ...] | None]:
    """What is sent of a value at first; for a tensor that is sent on its own, its type and its shape."""
    if isinstance(value, torch.Tensor) and value.numel() > _SMALL:
        return torch.empty(0, dtype=value.dtype), tuple(value.shape)
    return value, None


def _send_tensor(tensor: torch.Tensor, sender: int) -> None:
    sends = dist.get_rank() == sender
    buffer = tensor.detach().contiguous() if sends else torch.empty(tensor.shape, dtype=tensor.dtype)
    dist.broadcast(buffer, sender)
    if not sends:
        tensor.copy_(buffer)  # not in place by the backend: autograd counts changes


@torch.no_grad()
def require_same_state(model: nn.Module, optimizer: Any) -> None:
    """Raises StateDiffers unless weights and optimizer state have the same bits on all ranks. A collective."""
    sums = from_all_ranks(_checksum(model, optimizer))
    if len(set(sums)) > 1:
        raise StateDiffers(f"after a rank was replaced, the ranks have different states (checksums {sums})")


def _checksum(model: nn.Module, optimizer: Any) -> int:
    found = 0
    for parameter in model.parameters():
        if not isinstance(parameter, FrozenWeight):
            found = _crc(parameter, found)
    for _, values in sorted(optimizer.state_dict()["state"].items()):
        for _, value in sorted(values.items()):
            found = _crc(value, found) if isinstance(value, torch.Tensor) else zlib.crc32(repr(value).encode(), found)
    return found


def _crc(tensor: torch.Tensor, start: int) -> int:
    data: Any = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
    return zlib.crc32(data, start)
