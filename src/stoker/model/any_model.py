"""Models outside of the table: which of them can run without padding, or at least use Stoker's attention.

A model whose layers ask transformers' AttentionInterface for their attention can run over packed rows, if nothing else in it
mixes tokens and its positions can be given. What cannot be read from the code is tried on two short rows when the first
batch with padding arrives: the base model must give the same hidden states with and without padding.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from stoker.errors import one_line
from stoker.model.attention_interface import NAME, CannotPack
from stoker.model.class_swap import accepts_keywords, parameter_names, stock_class
from stoker.model.family import Family

__all__ = ["ANY", "base_models", "restore_attention", "tried", "use_attention", "uses_attention"]

ANY = Family(name="any other model", folder="", base="", layer="")
"""The row of a base model that is not in the table: nothing is known of its layers."""

_PACKABLE = {"input_ids", "attention_mask", "position_ids"}
_MIX_TOKENS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.RNNBase)
_LAYER_TYPES = {"full_attention", "sliding_attention"}

_before: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
"""The attention implementation that the configuration of a model named before `use_attention`."""


def _asks_interface(module: nn.Module) -> bool:
    """Whether this is a transformers model whose attention layers look up their implementation by name."""
    model: Any = stock_class(type(module))
    if not hasattr(model, "_can_set_attn_implementation") or getattr(module, "config", None) is None:
        return False
    return (
        hasattr(sys.modules.get(model.__module__), "ALL_ATTENTION_FUNCTIONS") and model._can_set_attn_implementation()
    )


def base_models(model: nn.Module) -> Iterator[nn.Module]:
    """The innermost models that take tokens, a padding mask and positions, and whose tokens meet in attention only."""
    for module in model.modules():
        if _may_pack(module) and not any(_may_pack(inner) for inner in module.modules() if inner is not module):
            yield module


def _may_pack(module: nn.Module) -> bool:
    return (
        _asks_interface(module)
        and set(parameter_names(type(module))) >= _PACKABLE
        and accepts_keywords(type(module))
        and not getattr(module.config, "is_encoder_decoder", False)
        and set(getattr(module.config, "layer_types", None) or ()) <= _LAYER_TYPES
        and not any(isinstance(inner, _MIX_TOKENS) for inner in module.modules())
    )


def use_attention(model: nn.Module) -> None:
    """Makes models inside `model` use Stoker's attention instead of transformers' default, which is not what a user chose."""
    for module in model.modules():
        if _asks_interface(module) and _has_default_attention(module):
            config: Any = module.config
            _before[module] = config._attn_implementation
            config._attn_implementation = NAME


def _has_default_attention(model: Any) -> bool:
    """Whether the implementation is sdpa, or eager in a model that sdpa cannot serve: it has a softcap or attention sinks."""
    name = getattr(model.config, "_attn_implementation", None)
    only_eager = not getattr(model, "_supports_sdpa", True) and getattr(model, "_supports_flash_attn", False)
    return name == "sdpa" or (name == "eager" and only_eager)


def uses_attention(module: nn.Module) -> bool:
    """Whether `use_attention` has changed the implementation of this model."""
    return module in _before


def restore_attention(model: nn.Module) -> None:
    """Undoes `use_attention`."""
    for module in model.modules():
        if (before := _before.pop(module, None)) is not None:
            module.config._attn_implementation = before  # type: ignore[union-attr]


def tried(model: Any, call: dict[str, Any], run: Any) -> str | None:
    """None if `model` gives the same hidden states without padding, else the reason why it cannot run so.

    `run(call)` computes a call without padding. The trial uses the first tokens of two rows of the batch at hand.
    """
    name = "input_ids" if "input_ids" in call else "inputs_embeds"
    tokens: Tensor = call[name]
    length = min(8, tokens.shape[1])
    if length < 2:
        return "the batch is too short to try the model without padding"
    rows = tokens[:1, :length].repeat(2, *[1] * (tokens.dim() - 1))
    mask = torch.ones(2, length, dtype=torch.int64)
    mask[1, length // 2 :] = 0
    short = {name: rows, "attention_mask": mask}
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        with torch.no_grad():
            expected = model.stoker_stock.forward(model, **short, use_cache=False)[0]
            actual = run({**short, "use_cache": False})[0]
    except CannotPack as error:
        return str(error)
    except Exception as error:  # foreign code may raise anything; then it runs as before
        return f"a trial without padding failed with {type(error).__name__}: {one_line(error)}"
    finally:
        for module, mode in modes.items():
            module.training = mode
    real = mask.bool()
    difference = (actual[real] - expected[real]).float().norm() / expected[real].float().norm().clamp(min=1e-9)
    limit = 1e-3 if expected.dtype == torch.float32 else 5e-2
    return None if float(difference) < limit else "it gives other results for packed rows"
