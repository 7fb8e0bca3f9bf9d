"""Models outside of the table: which of them can run without padding, or at least use Stoker's attention.

A model whose layers ask transformers' AttentionInterface for their attention can run over packed rows, if nothing else in it
mixes tokens and its positions can be given. What cannot be read from the code is tried on two rows of the first batch of each
kind: the packed model must give what the stock model gives with its stock attention.
"""

from __future__ import annotations

import copy
import inspect
import math
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stoker.english import with_article
from stoker.errors import one_line
from stoker.model.attention_interface import NAME, CannotPack, lists_implementations
from stoker.model.class_swap import accepts_keywords, parameter_names, stock_class
from stoker.model.config_view import give_views, is_view, original, originals, take_views
from stoker.model.family import Family

__all__ = [
    "ANY",
    "Kind",
    "base_models",
    "kind_of_call",
    "leaves",
    "per_token",
    "restore_attention",
    "tried",
    "use_attention",
    "uses_attention",
    "why_no_base_model",
]

ANY = Family(name="any other model", folder="", base="", layer="")
"""The row of a base model that is not in the table: nothing is known of its layers."""

_PACKABLE = ("input_ids", "attention_mask", "position_ids")
_MIX_TOKENS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.RNNBase)
_LAYER_TYPES = {"full_attention", "sliding_attention"}


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
    bypassed = {id(inner) for outer in model.modules() for inner, _ in _bypassed(outer)}
    for module in model.modules():
        innermost = not any(_may_pack(inner) for inner in module.modules() if inner is not module)
        if innermost and _may_pack(module) and id(module) not in bypassed:
            yield module


def _bypassed(outer: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """The models inside another one that calls their parts itself and never them, as BridgeTower does; and why."""
    inside = [(name, inner) for name, inner in outer.named_children() if _may_pack(inner)]
    if not inside or not _asks_interface(outer):
        return
    try:
        source = inspect.getsource(stock_class(type(outer)))
    except (OSError, TypeError):
        return
    for name, inner in inside:
        if f"self.{name}(" not in source and re.search(rf"self\.{name}\.(?!get_|set_)\w+(\.\w+)*[(\[]", source):
            yield (
                inner,
                f"{stock_class(type(outer)).__name__} calls parts of {stock_class(type(inner)).__name__} itself",
            )


def _may_pack(module: nn.Module) -> bool:
    return _asks_interface(module) and _why_not_packable(module) is None


def _why_not_packable(module: nn.Module) -> str | None:
    """Why the batches of a transformers model cannot be packed, as far as its code and configuration tell."""
    if getattr(module.config, "is_encoder_decoder", False):
        return "it is an encoder-decoder"
    if lacking := [name for name in _PACKABLE if name not in parameter_names(type(module))]:
        return f"its forward does not take {lacking[0]}"
    if not _asks_interface(module):
        return "its attention does not go through transformers' attention interface"
    if lists_implementations(type(original(module.config))):
        return "its code adds to the attention mask only for implementations that it names"
    if not accepts_keywords(type(module)):
        return "its forward takes no further keyword arguments"
    if other := set(getattr(module.config, "layer_types", None) or ()) - _LAYER_TYPES:
        return f"it has layers of the type {min(map(str, other))!r}"
    for inner in module.modules():
        if isinstance(inner, _MIX_TOKENS):
            return f"it has {with_article(type(inner).__name__)}, which mixes tokens"
    return None


def why_no_base_model(model: nn.Module) -> str | None:
    """Why no part of `model`, which has no base model, runs without padding; None if it takes no text."""
    from transformers import PreTrainedModel

    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    for module in [*(one.base_model for one in models[:1]), *models]:
        takes_text = "input_ids" in parameter_names(type(module))
        if takes_text and (why := _why_not_packable(module)) is not None:
            return f"{stock_class(type(module)).__name__}: {why}"
        for _, why in _bypassed(module):
            return why
    return None


def use_attention(model: nn.Module) -> None:
    """Makes models inside `model` use Stoker's attention instead of transformers' default, which is not what a user chose."""
    switched = {
        id(module.config) for module in model.modules() if _asks_interface(module) and _has_default_attention(module)
    }
    if switched:
        give_views(model, switched, NAME)


def _has_default_attention(model: Any) -> bool:
    """Whether the implementation is sdpa, or eager in a model that sdpa cannot serve: it has a softcap or attention sinks."""
    if lists_implementations(type(original(model.config))):
        return False
    name = getattr(model.config, "_attn_implementation", None)
    only_eager = not getattr(model, "_supports_sdpa", True) and getattr(model, "_supports_flash_attn", False)
    return name == "sdpa" or (name == "eager" and only_eager)


def uses_attention(module: nn.Module) -> bool:
    """Whether `use_attention` has changed the implementation of this model."""
    config: Any = getattr(module, "config", None)
    return is_view(config) and config._attn_implementation == NAME and _asks_interface(module)


def restore_attention(model: nn.Module) -> None:
    """Undoes `use_attention`."""
    if "transformers" in sys.modules:
        take_views(model)


# --- The trial


@dataclass(frozen=True)
class Kind:
    """What calls have in common that one trial stands for."""

    dtype: torch.dtype
    """Of the activations."""
    windows: tuple[int, ...]
    """Windows and chunks of the configuration that the longest sequence exceeds."""
    arguments: tuple[str, ...]
    """The arguments, and the values of options."""


def per_token(call: dict[str, Any], shape: tuple[int, int]) -> dict[str, Tensor] | str:
    """The arguments of a call that have a value for each token, or why one of the others cannot be packed."""
    found = {}
    for name, value in call.items():
        if name in ("attention_mask", "cu_seq_lens_q", "cu_seq_lens_k"):
            continue
        if isinstance(value, Tensor) and value.dim() > 0:
            rows = value.shape[:2] if name != "position_ids" or value.dim() > 1 else (1, *value.shape)
            if tuple(rows) != shape and not (name == "position_ids" and tuple(rows) == (1, shape[1])):
                return f"its argument {name} has shape {tuple(value.shape)}, which is not one value per token"
            found[name] = value
        elif isinstance(value, (list, tuple, dict)) and any(isinstance(one, Tensor) for one in leaves(value)):
            return f"its argument {name} is {with_article(type(value).__name__)} of tensors"
    return found


def leaves(value: Any) -> Iterator[Any]:
    """What lists, tuples and dictionaries contain, at any depth."""
    if isinstance(value, (list, tuple, dict)):
        for one in value.values() if isinstance(value, dict) else value:
            yield from leaves(one)
    else:
        yield value


def kind_of_call(model: Any, call: dict[str, Any], longest: int, dtype: torch.dtype) -> Kind:
    options = ("output_hidden_states", "output_router_logits")
    configured = {name: getattr(model.config, name, None) for name in options}
    given = {name: value for name, value in {**configured, **call}.items() if name != "return_dict"}
    # not numbers, such as num_items_in_batch: they differ from call to call
    values = {name: value if isinstance(value, (bool, str)) else "" for name, value in given.items()}
    windows = tuple(sorted(size for size in _windows(model.config) if size < longest))
    return Kind(dtype, windows, tuple(f"{name}={value}" for name, value in sorted(values.items())))


def _windows(config: Any) -> set[int]:
    """The sizes in a configuration after which attention changes."""
    words = ("window", "chunk", "local_attention", "block_size", "block_length")
    named = (value for name, value in vars(config).items() if any(word in name for word in words))
    return {value for value in named if isinstance(value, int) and value > 1}


_SHORT = 8
"""Tokens of a trial, if no window is shorter than the batch."""


def tried(
    model: Any, call: dict[str, Any], mask: Tensor, kind: Kind, run: Callable[[Any, Any, Tensor], Any]
) -> str | None:
    """None if `model` gives without padding what the stock model gives, else the reason why it cannot run so.

    `run(model, call, mask)` computes a call without padding. The trial repeats the beginning of the batch's longest sequence, a
    second time cut in half. It compares in the precision of the parameters, then in that of the call.
    """
    real = mask.bool()
    row = int(real.sum(1).argmax())
    start = int(real[row].int().argmax())
    length = min(int(real[row].sum()), max((_SHORT, *(size + _SHORT for size in kind.windows))))
    short, cut = _shortened(call, row, start, length)
    stock, packed = _twin(model, True, {}), _twin(model, False, {})
    stored = next(model.parameters()).dtype
    forward = model.stoker_stock.forward

    def outputs(dtype: torch.dtype) -> tuple[Any, Any]:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=dtype != stored):
            expected = forward(stock, **short, attention_mask=cut, use_cache=False, return_dict=True)
            return expected, run(packed, {**short, "attention_mask": cut, "use_cache": False}, cut)

    try:
        expected, actual = outputs(stored)
        reason = _difference(expected, actual, cut.bool(), 1e-4 if stored == torch.float32 else 5e-2)
        if reason is None and kind.dtype != stored:
            # Rounding may send a token to another expert, so most tokens must be as close to the exact result as stock's.
            rounded, found = outputs(kind.dtype)
            allowed = 0.01 + 2 * _distance(expected[0], rounded[0], cut.bool(), most=True)
            reason = _difference(expected, found, cut.bool(), allowed, most=True)
        return reason
    except CannotPack as error:
        return str(error)
    except Exception as error:  # foreign code may raise anything; then it runs as before
        return f"a trial without padding failed with {type(error).__name__}: {one_line(error)}"


def _shortened(call: dict[str, Any], row: int, start: int, length: int) -> tuple[dict[str, Any], Tensor]:
    """The arguments of a call for `length` tokens of one row, twice, and the mask that cuts the second one in half."""
    short = {}
    for name, value in call.items():
        if name in ("attention_mask", "use_cache", "return_dict"):
            continue
        if isinstance(value, Tensor) and value.dim() > 0:
            rows = value.unsqueeze(0) if name == "position_ids" and value.dim() == 1 else value
            at = row if rows.shape[0] > 1 else 0
            one = rows[at : at + 1, start : start + length]
            if name == "position_ids":
                one = one - one[:, :1]
            value = one.repeat(2, *[1] * (one.dim() - 1))
        short[name] = value
    mask = torch.ones(2, length, dtype=torch.int64)
    mask[1, (length + 1) // 2 :] = 0
    return short, mask


def _twin(module: nn.Module, stock: bool, made: dict[int, nn.Module]) -> nn.Module:
    """The modules of a model in evaluation mode, sharing its parameters; with `stock`, as they were before `optimize`.

    The model itself is not switched to evaluation, because other threads may be training it.
    """
    if id(module) not in made:
        cls = stock_class(type(module)) if stock else type(module)
        made[id(module)] = twin = cls.__new__(cls)
        # Dictionaries of its own: a call may register hooks (as transformers does to capture outputs) or buffers.
        own = {name: copy.copy(one) if isinstance(one, dict) else one for name, one in module.__dict__.items()}
        twin.__dict__.update({**own, **(originals(own) if stock else {}), "training": False, "stoker_twin": True})
        twin.__dict__["_modules"] = {
            name: None if inner is None else _twin(inner, stock, made) for name, inner in module._modules.items()
        }
    return made[id(module)]


def _difference(expected: Any, actual: Any, real: Tensor, limit: float, most: bool = False) -> str | None:
    """What differs between two outputs of a model, at real tokens."""
    names = [name for name in expected if isinstance(expected[name], (Tensor, tuple, list))]
    for name in names:
        pairs = list(zip(leaves(expected[name]), leaves(actual.get(name)), strict=False))
        if len(pairs) != len(list(leaves(expected[name]))):
            return f"packed rows have no {name}"
        for one, other in pairs:
            if isinstance(one, Tensor) and (not isinstance(other, Tensor) or one.shape != other.shape):
                return f"its {name} cannot be laid out again"
            if isinstance(one, Tensor) and not _distance(one, other, real, most) < limit:
                return f"it gives other results for packed rows ({name})"
    return None


def _distance(one: Tensor, other: Tensor, real: Tensor, most: bool = False) -> float:
    """The norm of the difference at real tokens, relative to that of `one`; with `most`, the median of the tokens' own."""
    if one.shape[:2] == real.shape:
        one, other = one[real], other[real]
    elif one.dim() > 1 and one.shape[0] == real.numel():
        one, other = one[real.reshape(-1)], other[real.reshape(-1)]
    one, other = one.float(), other.float()
    if most and one.dim() > 1:
        each = (one - other).flatten(1).norm(dim=1) / one.flatten(1).norm(dim=1).clamp(min=1e-9)
        return float(each.median()) if bool(other.isfinite().all()) else math.inf
    return float((one - other).norm() / one.norm().clamp(min=1e-9))
