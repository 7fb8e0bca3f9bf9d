"""Switches torch's own optimizers to their fused implementation in place: schedulers, state and param groups are kept.

AdamW and Adam then update all parameters by one native call (model/native_adam.py).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from stoker.model import native_adam
from stoker.requires import supported

__all__ = ["fuse", "unfuse"]

_FUSABLE = (Adam, AdamW, SGD, Adagrad)

_STOCK_FLAGS: WeakKeyDictionary[Optimizer, list[tuple[Any, Any]]] = WeakKeyDictionary()
"""Cache of the original (fused, foreach) flags of each optimizer: its defaults first, then its groups."""


def fuse(optimizer: Any, sparse: Collection[Tensor] = ()) -> str:
    """Switches `optimizer` to its fused implementation if it has one; returns what was done, or why not, for the report.

    `sparse`: the parameters whose gradients will be sparse, which no fused implementation accepts.
    """
    inner = _unwrapped(optimizer)
    name = type(inner).__name__
    if reason := _why_not(inner, {id(parameter) for parameter in sparse}):
        return f"{name} left alone: {reason}"
    if all(group.get("fused") for group in inner.param_groups):
        _make_native(inner)
        return f"{name} was already fused"
    flagged = [inner.defaults, *inner.param_groups]
    _STOCK_FLAGS[inner] = [(flags.get("fused"), flags.get("foreach")) for flags in flagged]
    for flags in flagged:
        flags["fused"], flags["foreach"] = True, False
    for state in inner.state.values():
        if isinstance(step := state.get("step"), torch.Tensor):
            state["step"] = step.to(torch.float32)  # the fused kernels count in fp32
        elif step is not None:
            state["step"] = torch.tensor(float(step))
    inner._step_supports_amp_scaling = True  # as the constructor does for fused=True
    inner._need_device_dtype_check_for_fused = True
    _make_native(inner)
    return f"{name} fused"


def _make_native(inner: Any) -> None:
    if isinstance(inner, Adam):  # AdamW is one, too
        native_adam.install(inner)


def unfuse(optimizer: Any) -> None:
    """Restores the implementation and the flags of an optimizer that `fuse` changed."""
    inner = _unwrapped(optimizer)
    native_adam.remove(inner)
    flagged = [inner.defaults, *inner.param_groups]
    known = _STOCK_FLAGS.pop(inner, [])
    # groups that were added since take the defaults' flags
    for flags, (fused, foreach) in zip(flagged, known + known[:1] * (len(flagged) - len(known)), strict=False):
        flags["fused"], flags["foreach"] = fused, foreach
    if known:
        inner._step_supports_amp_scaling = False


def _unwrapped(optimizer: Any) -> Any:
    """The optimizer inside accelerate's AcceleratedOptimizer."""
    return optimizer if isinstance(optimizer, _FUSABLE) else getattr(optimizer, "optimizer", optimizer)


def _why_not(optimizer: Any, sparse: set[int]) -> str | None:
    if type(optimizer) not in _FUSABLE:
        return "it has no fused implementation"
    if not supported("fused optimizers"):
        return "its fused implementation has changed in this version of torch"
    for group in optimizer.param_groups:
        if group.get("differentiable") or group.get("capturable"):
            return "it is differentiable or capturable"
        if isinstance(group["lr"], torch.Tensor):
            return "its learning rate is a tensor"
        for parameter in group["params"]:
            if parameter.device.type != "cpu" or not torch.is_floating_point(parameter):
                return f"it holds a parameter that is {parameter.dtype} on {parameter.device}"
            if id(parameter) in sparse:
                return "it holds an embedding table with sparse gradients"
    return None
