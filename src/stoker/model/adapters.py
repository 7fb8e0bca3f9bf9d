"""Linear layers whose weights can be read instead of calling them: plain ones, and those that peft wrapped with LoRA.

peft and bitsandbytes are not imported: their layers are recognised by the name of their class and read by their public
attributes. Whatever changes the formula (merged or disabled adapters, DoRA and other variants, biases, foreign quantized
weights, hooks) makes the layer unreadable, and the caller calls it. Frozen weights in few bits are read as they are stored, our
own and the NF4 of bitsandbytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stoker.kernels.frozen_parameter import stored_weight
from stoker.kernels.lora import Adapter
from stoker.kernels.quantized import read_params4bit
from stoker.kernels.widening import Weight
from stoker.model.class_swap import ordinary, plain, unhooked
from stoker.model.leaf_modules import dropout_probability, is_conv1d

__all__ = ["LinearParts", "is_lora", "read_linear"]

_LORA_LAYERS = {("peft.tuners.lora.layer", "Linear"), ("peft.tuners.lora.bnb", "Linear4bit")}


@dataclass(frozen=True)
class LinearParts:
    """What a linear layer computes: x weight^T + bias + what its adapters add."""

    weight: Weight
    bias: Tensor | None
    adapters: tuple[Adapter, ...] = ()


def read_linear(module: Any) -> LinearParts | None:
    """The weights of a linear layer, None if the module has to be called."""
    if (base := _read_base(module)) is not None:
        return base
    if not is_lora(module):
        return None
    try:
        return _read_lora(module)
    except (AttributeError, KeyError):  # a version of peft with other attributes
        return None


def is_lora(module: Any) -> bool:
    """Whether peft has wrapped this layer with LoRA."""
    cls = type(module)
    # subclasses may have another forward
    return (cls.__module__, cls.__qualname__) in _LORA_LAYERS


def _read_base(module: Any) -> LinearParts | None:
    """A linear layer without adapters; the weight of transformers' Conv1D (GPT-2) is (in, out)."""
    if plain(module, nn.Linear):
        return LinearParts(stored_weight(module.weight), module.bias)
    if is_conv1d(module) and unhooked(module) and ordinary(module):
        weight = stored_weight(module.weight)
        return LinearParts(weight.t() if weight is module.weight else weight, module.bias)
    return _read_linear4bit(module)


def _read_linear4bit(module: Any) -> LinearParts | None:
    """A layer of bitsandbytes whose weight is in NF4. Its products take the type of the activations, as Stoker's own do."""
    cls = type(module)
    if (cls.__module__, cls.__qualname__) != ("bitsandbytes.nn.modules", "Linear4bit") or not unhooked(module):
        return None
    weight = read_params4bit(module.weight)
    if weight is None or weight.shape[1] % 2 or not (module.bias is None or _native(module.bias)):
        return None
    return LinearParts(weight, module.bias)


def _read_lora(module: Any) -> LinearParts | None:
    base = _read_base(module.base_layer)
    # adapter_names of a mixed batch arrive through a hook
    if base is None or not unhooked(module):
        return None
    if module.disable_adapters or module.merged or module.fan_in_fan_out != is_conv1d(module.base_layer):
        return None
    # as in peft, an adapter that this layer does not have is active in others only
    adapters = [_read_adapter(module, name) for name in module.active_adapters if name in module.lora_A]
    found = tuple(one for one in adapters if one is not None)
    tensors = [one for adapter in found for one in (adapter.a, adapter.b)]
    tensors += [base.weight] if isinstance(base.weight, Tensor) else []
    if len(found) < len(adapters) or not all(map(_native, tensors)):
        return None
    return LinearParts(base.weight, base.bias, found)


def _read_adapter(module: Any, name: str) -> Adapter | None:
    a, b, drop = module.lora_A[name], module.lora_B[name], module.lora_dropout[name]
    scaling, p = module.scaling[name], dropout_probability(drop)
    if name in module.lora_variant or module.use_dora[name]:
        return None
    if not plain(a, nn.Linear) or not plain(b, nn.Linear) or a.bias is not None or b.bias is not None:
        return None
    # dropout in place would change the input of the other layers too; compiled hot swapping makes scaling a tensor
    if p is None or getattr(drop, "inplace", False) or not isinstance(scaling, (int, float)):
        return None
    return Adapter(a.weight, b.weight, float(scaling), p)


def _native(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.dtype in (torch.float32, torch.bfloat16)
