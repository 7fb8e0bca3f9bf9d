"""AdamW and Adam of torch with their update as one native call over all parameters of all groups (kernels/adamw.py).

torch's own `step` runs as before, with its hooks, closures and schedulers around it. It collects the tensors of each group by the
method `_init_group`, and updates those that it gets. `NativeAdam` takes the place of that method in one optimizer: for the first
group it updates all parameters, and gives torch nothing to do. State and param groups are torch's own. A step that the kernel
does not support (sparse gradients, another device, type or layout, scaled gradients, ...) is torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from operator import is_, itemgetter
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from stoker.kernels.adamw import AdamTensors
from stoker.kernels.tensors import PLAIN, available, identities

__all__ = ["install", "remove"]

_METHOD = "_init_group"
_NAMES = ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")
"""The state of a parameter; the last one only with amsgrad."""
_TYPES = (torch.float32, torch.bfloat16)
_params = itemgetter("params")
_amsgrad = itemgetter("amsgrad")


def install(optimizer: Any) -> None:
    """Makes `optimizer`, an AdamW or Adam with fused=True, update its parameters natively where that is possible."""
    parameters = chain.from_iterable(map(_params, optimizer.param_groups))
    if _METHOD not in vars(optimizer) and available() and all(map(_supported, parameters)):
        # In the instance: pickling and copying leave it behind, because torch lists what belongs to the state of an optimizer.
        setattr(optimizer, _METHOD, NativeAdam(optimizer))


def remove(optimizer: Any) -> None:
    """Undoes `install`."""
    if isinstance(method := vars(optimizer).get(_METHOD), NativeAdam):
        method.release()
        delattr(optimizer, _METHOD)


def _supported(parameter: Tensor) -> bool:
    return (
        type(parameter) in PLAIN
        and parameter.dtype in _TYPES
        and parameter.device.type == "cpu"
        and parameter.layout == torch.strided
        and parameter.is_contiguous()
    )


class NativeAdam:
    """Called by torch's `step` in place of `_init_group`, for one group after the other."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = ref(optimizer)  # a strong one would keep the parameters until the next garbage collection
        self._known: _Known | None = None
        self._served = False
        self._hook = optimizer.register_load_state_dict_post_hook(self._forget)

    def __call__(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        optimizer: Any = self._optimizer()
        stock: Callable[..., bool] = getattr(type(optimizer), _METHOD)
        if group is optimizer.param_groups[0]:
            self._served = self._update(optimizer, stock)
        # empty lists and no complex number: nothing is left to do for torch
        return False if self._served else stock(optimizer, group, *lists)

    def release(self) -> None:
        self._hook.remove()

    def _forget(self, optimizer: Any) -> None:
        self._known = None  # at once: the replaced state may be as large as two models

    def _update(self, optimizer: Any, stock: Callable[..., bool]) -> bool:
        """Updates all parameters; False if torch has to do it, and nothing was changed."""
        groups = optimizer.param_groups
        if not all(map(_served, groups)) or not _usual_call(optimizer):
            return False
        parameters = list(chain.from_iterable(map(_params, groups)))
        known = self._known
        if known is None or not known.unchanged(optimizer, parameters):
            known = self._known = _look_at(optimizer, parameters)
        if known is None:
            remove(optimizer)  # looking again in every step would be slower than torch
            return False
        if not known.tensors.read():
            return False
        if known.tensors.lacks_state():
            for group in groups:
                stock(optimizer, group, *([] for _ in range(6)))  # creates the state of parameters with a gradient
            known = self._known = _look_at(optimizer, parameters)
            if known is None or not known.tensors.read():
                return False
        known.tensors.update([(len(group["params"]), group) for group in groups])
        known.tensors.gradients.count_changes(gradients=False)  # of the parameters; torch's fused kernels forget it
        return True


def _served(group: dict[str, Any]) -> bool:
    """Whether the kernel supports the options of a group; they may change from step to step."""
    return (
        bool(group["fused"])
        and not group["capturable"]
        and not group["differentiable"]
        and isinstance(group["lr"], (float, int))
        and all(isinstance(beta, (float, int)) for beta in group["betas"])
    )


def _usual_call(optimizer: Any) -> bool:
    """Whether `step` runs now, with gradients as they are; torch.compile calls `_init_group` to trace what follows."""
    return (
        getattr(optimizer, "grad_scale", None) is None
        and getattr(optimizer, "found_inf", None) is None
        and not torch.compiler.is_compiling()
    )


class _Known:
    """Parameters and state of an optimizer as they were looked at last.

    Only objects are compared, by loops that run in C. That is enough: where the memory of each tensor lies is read in every step.
    """

    def __init__(self, optimizer: Any, parameters: list[Tensor], names: Sequence[tuple[str, ...]]) -> None:
        entries = [optimizer.state.get(parameter) or {} for parameter in parameters]
        tensors = [{name: one[name] for name in needed if one} for one, needed in zip(entries, names, strict=True)]
        self.tensors = AdamTensors(parameters, tensors)
        self._state = optimizer.state
        self._entries = list(optimizer.state.values())
        self._amsgrad = list(map(_amsgrad, optimizer.param_groups))
        self._getters = [
            (itemgetter(name), [one for one, own in zip(entries, tensors, strict=True) if name in own])
            for name in _NAMES
        ]
        self._held = list(self._state_tensors())
        # torch.utils.swap_tensors, which exchanges the C++ objects of tensors, refuses those that have a weak reference
        self._unswapped = list(map(ref, self._held))

    def _state_tensors(self) -> Iterator[Tensor]:
        return chain.from_iterable(map(getter, entries) for getter, entries in self._getters)

    def unchanged(self, optimizer: Any, parameters: list[Tensor]) -> bool:
        try:
            return (
                optimizer.state is self._state
                and len(self._state) == len(self._entries)
                and all(map(is_, self._state.values(), self._entries))
                and all(map(is_, self._state_tensors(), self._held))
                and identities(parameters) == self.tensors.identities
                and list(map(_amsgrad, optimizer.param_groups)) == self._amsgrad
            )
        except KeyError:  # a tensor was removed from the state
            return False


def _look_at(optimizer: Any, parameters: list[Tensor]) -> _Known | None:
    """None if the kernel does not support a parameter or its state."""
    if len(set(map(id, parameters))) < len(parameters):
        return None  # torch updates such a parameter twice, one after the other
    names = [_NAMES if group["amsgrad"] else _NAMES[:-1] for group in optimizer.param_groups for _ in group["params"]]
    for parameter, needed in zip(parameters, names, strict=True):
        entry = optimizer.state.get(parameter)
        if not _supported(parameter) or (entry and not all(type(entry.get(name)) in PLAIN for name in needed)):
            return None
    return _Known(optimizer, parameters, names)
