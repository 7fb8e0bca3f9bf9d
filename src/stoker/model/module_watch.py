"""Whether a tree of modules is still as it was: its classes, hooks, parameters, children, modes and settings.

What `optimize` has found out about a model holds as long as nobody wraps, hooks, replaces, freezes or switches anything in it. A
`Watch` looks at all of that at once, by comparisons that run in C: about 0.1 ms for a model of twelve layers, where reading the
modules again takes milliseconds. With adapters there are ten times as many modules, and most of the time is spent on fetching
them from memory, so what cannot matter is not looked at.
"""

from __future__ import annotations

import weakref
from itertools import repeat
from operator import attrgetter, contains, getitem, is_, methodcaller
from types import BuiltinFunctionType, FunctionType
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from stoker.kernels.frozen_parameter import FrozenWeight
from stoker.model.adapters import is_lora

__all__ = ["Watch"]

_CONTAINERS = frozenset({nn.ModuleDict, nn.ModuleList, nn.ParameterDict, nn.ParameterList})
"""They are never called: only what they contain matters."""
_MODELESS = frozenset({nn.Linear, nn.Identity})
"""They compute the same in training and in evaluation."""
_NUMBERS = ("p", "eps", "variance_epsilon", "epsilon", "approximate", "inplace")
"""What a dropout, a norm or an activation computes with, beside its parameters."""
_SETTINGS = (bool, int, float, str, tuple, list, type(None), FunctionType, BuiltinFunctionType)
"""Types of what layers, and other modules that consist of modules, keep as plain attributes."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_ALL = frozenset(nn.Module().__dict__)
_IDLE = _OF_ALL | {
    "_caches", "cast_input_dtype_enabled", "ephemeral_gpu_offload", "in_features", "is_target_conv_1d_layer", "kwargs",
    "lora_alpha", "lora_bias", "out_features", "r", "use_rslora",
}  # fmt: skip
"""What the result of peft's layers does not depend on. The rest says which adapters are active or merged, and their scaling."""
_STORED = ("stored", "quant_state")
"""Where the values of a parameter are, if not in its own memory: Stoker's FrozenWeight, bitsandbytes' Params4bit."""
_trained = attrgetter("requires_grad")
_dtype = attrgetter("dtype")
_shape = attrgetter("shape")
_stride = methodcaller("stride")


class Watch:
    """The state of a module and of all modules inside it, when it was made."""

    def __init__(self, root: nn.Module) -> None:
        self.facts: dict[Any, Any] = {}
        """What others have found out from this state, which they must not use in another one. By the id of a module: the watch
        of a single layer must not keep it alive."""
        modules = list(root.modules())
        called = [module for module in modules if type(module) not in _CONTAINERS]
        self._root, self._class = weakref.ref(root), type(root)  # weak, because caches by model hold watches
        self._modules = [module for module in called if module is not root]
        self._classes = list(map(type, self._modules))
        dicts = [module.__dict__ for module in called]
        switched = (module.__dict__ for module in called if type(module) not in _MODELESS)
        self._switched = [
            found for found in switched if "training" in found
        ]  # torch.compile's wrapper asks the module inside
        self._modes = [found["training"] for found in self._switched]
        self._stock = [found for found in dicts if "forward" not in found]
        self._note_hooks(dicts)
        self._note_values(called, dicts)
        children = [module._modules for module in modules]
        # a child that is added to a leaf changes nothing
        self._childless = [one for module, one in zip(modules, children, strict=True) if not one and not _leaf(module)]
        self._families = [one for one in children if one]
        self._children = [one.copy() for one in self._families]
        self._note_parameters([module._parameters for module in modules if module._parameters or not _leaf(module)])

    def _note_hooks(self, dicts: list[dict[str, Any]]) -> None:
        self._handles = RemovableHandle.next_id
        hooks = [(found, name) for found in dicts for name in _HOOKS]
        self._unhooked = [(found, name) for found, name in hooks if not found[name]]
        self._hooked = [found[name] for found, name in hooks if found[name]]
        self._hooks = [one.copy() for one in self._hooked]

    def _note_values(self, modules: list[nn.Module], dicts: list[dict[str, Any]]) -> None:
        values = [(found, name) for found in dicts for name in (*_NUMBERS, "forward") if name in found]
        for module, found in zip(modules, dicts, strict=True):
            if is_lora(module):
                values += [(found, name) for name in found if name not in _IDLE]
            elif module._modules:
                plain = (name for name, value in found.items() if isinstance(value, _SETTINGS) and name not in _OF_ALL)
                values += [(found, name) for name in plain]
        self._holders, self._names = [found for found, _ in values], [name for _, name in values]
        self._values = [_copy(found[name]) for found, name in values]
        configs = {id(found["config"]): found["config"] for found in dicts if "config" in found}
        self._configs = [vars(config) for config in configs.values() if hasattr(config, "__dict__")]
        self._configured = [found.copy() for found in self._configs]

    def _note_parameters(self, tables: list[dict[str, nn.Parameter | None]]) -> None:
        self._tables = tables
        self._sizes = list(map(len, tables))
        self._owners = [table for table in tables for _ in table]
        self._keys = [name for table in tables for name in table]
        self._parameters = [one for table in tables for one in table.values()]
        self._kinds = list(map(type, self._parameters))
        # A FrozenWeight runs Python when it is asked for these. It has one type and no gradient, and a write changes its class.
        self._tensors = [one for one in self._parameters if one is not None and not isinstance(one, FrozenWeight)]
        self._flags = list(map(_trained, self._tensors))
        self._types = list(map(_dtype, self._tensors))
        self._shapes = list(map(_shape, self._tensors))
        self._strides = list(map(_stride, self._tensors))
        self._others = [one for one in self._parameters if type(one) not in (Tensor, nn.Parameter, type(None))]
        self._stored = self._where_stored()

    def _where_stored(self) -> list[Any]:
        return [one.__dict__.get(name) for one in self._others for name in _STORED]

    def _hooks_unchanged(self) -> bool:
        # Every hook that is registered takes a number. If none was taken since, there is none to look for.
        if self._handles != RemovableHandle.next_id:
            if any(found[name] for found, name in self._unhooked):
                return False
            self._handles = RemovableHandle.next_id
        return self._hooked == self._hooks

    def unchanged(self) -> bool:
        try:
            return (
                type(self._root()) is self._class
                and list(map(type, self._modules)) == self._classes
                and list(map(getitem, self._switched, repeat("training"))) == self._modes
                and self._hooks_unchanged()
                and not any(self._childless)
                and self._families == self._children
                and not any(map(contains, self._stock, repeat("forward")))
                and list(map(getitem, self._holders, self._names)) == self._values
                and self._configs == self._configured
                and list(map(len, self._tables)) == self._sizes
                and all(map(is_, map(getitem, self._owners, self._keys), self._parameters))
                and list(map(type, self._parameters)) == self._kinds
                and list(map(_trained, self._tensors)) == self._flags
                and list(map(_dtype, self._tensors)) == self._types
                and list(map(_shape, self._tensors)) == self._shapes
                and list(map(_stride, self._tensors)) == self._strides
                and all(map(is_, self._where_stored(), self._stored))
            )
        except (KeyError, RuntimeError):  # something was removed; or a tensor took the place of a number
            return False


def _leaf(module: nn.Module) -> bool:
    """Whether this is one of torch's modules that compute with nothing but what they have."""
    return type(module) not in _CONTAINERS and type(module).__module__.startswith("torch.nn.modules.")


def _copy(value: Any) -> Any:
    """A container as it is now; other values are replaced, not changed."""
    return value.copy() if isinstance(value, (dict, list, set)) else value
