"""A copy of an optimized model that computes as stock transformers does, with the same parameters.

`optimize` changes classes and the name of the attention implementation in place. The copy consists of the same parameters and
buffers in modules of the stock classes, so the model itself, which other threads may be training, is left alone.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from stoker.model.attention_interface import NAME, stock_implementation
from stoker.model.class_swap import stock_class
from stoker.model.config_view import is_view, original

__all__ = ["stock_twin"]

_CAPTURING = "transformers.utils.output_capturing"


def stock_twin(model: nn.Module, *, hooked: bool, checkpointed: bool) -> nn.Module:
    """`hooked`: with the hooks of its modules; `checkpointed`: with their activation checkpointing.

    The hooks by which transformers captures hidden states stay in any case.
    """
    configs: dict[int, Any] = {}
    for module in model.modules():
        for config in module.__dict__.values():
            if not hasattr(config, "_attn_implementation"):
                continue
            if is_view(config):
                configs[id(config)] = original(config)
            elif config._attn_implementation == NAME and id(config) not in configs:  # a user chose it
                # a deep copy, because the setter passes the name on to the configurations inside
                name = stock_implementation(config)
                configs[id(config)] = config = copy.deepcopy(config)
                config._attn_implementation = name
    return _twin(model, {}, configs, hooked, checkpointed)


def _twin(
    module: nn.Module, made: dict[int, nn.Module], configs: dict[int, Any], hooked: bool, checkpointed: bool
) -> nn.Module:
    if id(module) in made:
        return made[id(module)]
    cls = stock_class(type(module))
    made[id(module)] = twin = cls.__new__(cls)
    own = {name: configs.get(id(one), one) for name, one in module.__dict__.items()}
    # accelerate stores a function here that calls the model itself
    own = {name: one for name, one in own.items() if name not in ("forward", "_original_forward")}
    for name, one in own.items():
        if isinstance(one, dict):  # its own, because a call may register hooks or buffers
            kept = hooked or not name.endswith("_hooks")
            own[name] = type(one)((key, value) for key, value in one.items() if kept or _captures(value))
    if not checkpointed and own.get("gradient_checkpointing"):
        own["gradient_checkpointing"] = False
    own["_modules"] = {
        name: None if inner is None else _twin(inner, made, configs, hooked, checkpointed)
        for name, inner in module._modules.items()
    }
    twin.__dict__.update(own)
    return twin


def _captures(hook: Any) -> bool:
    return str(getattr(getattr(hook, "func", hook), "__module__", "")) == _CAPTURING
