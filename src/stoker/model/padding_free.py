"""The door of a base model (BertModel, ...): padding stays outside.

A batch (batch, length) goes in as (1, tokens) with explicit positions, the stock forward runs over it, so that output
classes, hidden states and checkpointing stay transformers' own, and the result is laid out as (batch, length, width) again.
A call that cannot be seen as sequences runs as stock does, and says so once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from stoker.english import with_article
from stoker.model import precision
from stoker.model.class_swap import (
    Optimized,
    accepts_keywords,
    child,
    named,
    plain,
    stock_class,
    stock_wanted,
    unhooked,
)
from stoker.model.families import Family, find, transformers_major
from stoker.model.padding_warnings import warn_if_padding_counts, warn_of_zeros
from stoker.model.sequences import Sequences, count, read_mask, running

__all__ = ["PaddingFreeModel", "always_stock", "stock_calls"]

log = logging.getLogger("stoker")

_STOCK_CALLS: WeakKeyDictionary[nn.Module, dict[str, None]] = WeakKeyDictionary()
"""Cache of the reasons for which a door let a call through as it was, so that each is told once."""

_NEEDS_STOCK = {
    "past_key_values": "a cache is used",
    "encoder_hidden_states": "cross attention is used",
    "head_mask": "a head mask is given",
}
_PADDING_STAYS = "unpad=False, and the batch has padding"
_BY_TOKEN = ("input_ids", "inputs_embeds", "token_type_ids", "position_ids")


class PaddingFreeModel(Optimized):
    """Override of a base model."""

    stoker_part = "padding-free base model"
    stoker_model = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        call = named(self, args, kwargs)
        sequences = self._sequences(call)
        if isinstance(sequences, str):
            given = _positions(call)
            count(given, given)
            if sequences == _PADDING_STAYS:
                return self._with_padding(args, kwargs)
            _tell(self, sequences)
            return super().forward(*args, **kwargs)
        count(sequences.batch * sequences.length, sequences.tokens)
        return_dict = call.pop("return_dict", getattr(self.config, "return_dict", True))
        packed = self._packed(call, sequences)
        if accepts_keywords(type(self)):
            packed["stoker_sequences"] = sequences
        # No autocast inside: layers cast for themselves, and what is left is small.
        with running(sequences), torch.autocast("cpu", enabled=False):
            output = super().forward(**packed, return_dict=True)
            return self._unpacked(output, sequences, return_dict)

    def _with_padding(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The stock forward in the precision that was asked for: what `unpad=False` means for a batch with padding."""
        stored = next(self.parameters()).dtype
        dtype = precision.activations(self.stoker_settings.dtype, stored)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype != stored):
            output = super().forward(*args, **kwargs)
        return output if dtype == stored else _cast(output, stored)

    def _sequences(self, call: dict[str, Any]) -> Sequences | str:
        row: Family = self.stoker_row
        if reason := _why_stock(self, row, call):
            return reason
        tokens = call["input_ids"] if "input_ids" in call else call["inputs_embeds"]
        mask = call.get("attention_mask")
        for name, x in (("batch", tokens), ("attention mask", mask)):
            if type(x) not in (Tensor, nn.Parameter, type(None)):  # FakeTensor, DTensor, ...: nothing to look into
                return f"the {name} is {with_article(type(x).__name__)}"
        batch, length = tokens.shape[:2]
        if not tokens.numel():
            return "the batch is empty"
        if mask is not None and tuple(mask.shape) != (batch, length):
            return f"the attention mask, of {mask.dim()} dimensions, is not (batch, length)"
        parameter = next(self.parameters(), None)
        if parameter is None:
            return "the model has no parameters of its own"
        if parameter.device.type != "cpu" or parameter.dtype not in (torch.float32, torch.bfloat16):
            return f"the model is {parameter.dtype} on {parameter.device}"
        settings = self.stoker_settings
        if not settings.unpad and mask is not None and not bool(mask.all()):
            return _PADDING_STAYS
        dtype = precision.activations(settings.dtype, parameter.dtype)
        return read_mask(mask, batch, length, dtype=dtype, device=tokens.device)

    def _packed(self, call: dict[str, Any], sequences: Sequences) -> dict[str, Any]:
        row: Family = self.stoker_row
        packed = {name: sequences.pack(call[name]) for name in _BY_TOKEN if name in call}
        if "position_ids" not in packed:
            positions = sequences.positions
            if row.positions_after_padding:
                embeddings: Any = self.embeddings
                positions = sequences.positions_after(embeddings.padding_idx, packed.get("input_ids"))
            packed["position_ids"] = positions.unsqueeze(0)
        if "token_type_ids" not in packed and transformers_major() < 5 and _has_types(self):
            # transformers 4 would cut them from a buffer that ends at the longest sequence
            packed["token_type_ids"] = torch.zeros_like(packed["position_ids"])
        return {**call, **packed, "attention_mask": row.empty_mask}

    def _unpacked(self, output: Any, sequences: Sequences, return_dict: bool) -> Any:
        row: Family = self.stoker_row
        dtype = next(self.parameters()).dtype
        done: dict[int, Tensor] = {}  # the last of the hidden states is the output itself

        def unpack(x: Tensor) -> Tensor:
            if id(x) not in done:
                done[id(x)] = sequences.unpack(x.to(dtype))
                warn_if_padding_counts(self, done[id(x)], sequences)
            return done[id(x)]

        hidden = unpack(output.last_hidden_state)
        if states := output.get("hidden_states"):
            if sequences.mask is not None:
                warn_of_zeros(self, "hidden_states are returned, and")
            output.hidden_states = tuple(state if state is None else unpack(state) for state in states)
        output.last_hidden_state = hidden
        if output.get("pooler_output") is not None:
            # stock pooled the first token of the packed batch; every sequence has one
            output.pooler_output = row.pooled(self, hidden)
        if return_dict:
            return output
        if row.pooler_slot_until >= transformers_major():
            rest = (value for name, value in output.items() if name not in ("last_hidden_state", "pooler_output"))
            return (hidden, output.get("pooler_output"), *rest)
        return output.to_tuple()


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """The output of a model, or a part of it, with its tensors in another type."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, tuple):
        return tuple(_cast(one, dtype) for one in value)
    if isinstance(value, dict):
        for name, one in list(value.items()):
            value[name] = _cast(one, dtype)
    return value


def _positions(call: dict[str, Any]) -> int:
    tokens = call.get("input_ids", call.get("inputs_embeds"))
    return tokens.shape[:2].numel() if isinstance(tokens, Tensor) else 0


def _has_types(model: Any) -> bool:
    return hasattr(getattr(model, "embeddings", None), "token_type_embeddings")


def _why_stock(model: Any, row: Family, call: dict[str, Any]) -> str | None:
    """The reason, readable from arguments and modules alone, why a call has to run as stock does."""
    config = model.config
    for name, reason in _NEEDS_STOCK.items():
        if name in call:
            return reason
    if getattr(config, "is_decoder", False) or call.get("use_cache"):
        return "the model is a decoder"
    if call.get("is_causal", getattr(config, "is_causal", False)):
        return "attention is causal"
    if call.get("output_attentions", getattr(config, "output_attentions", False)):
        return "attention weights are asked for, and never exist here"
    if getattr(config, "position_embedding_type", None) not in (None, "absolute"):
        return f"position_embedding_type is {config.position_embedding_type!r}"
    if not _known_attention(getattr(config, "_attn_implementation", None)):
        return f"attention is computed by {config._attn_implementation!r}, which is not transformers' own"
    if ("input_ids" in call) == ("inputs_embeds" in call):
        return "not exactly one of input_ids and inputs_embeds is given"  # stock raises the error
    if stock_wanted():
        return "the model is being traced, exported or transformed"
    return _altered(model, row)


def _known_attention(name: str | None) -> bool:
    """Whether this is one of transformers' implementations, which differ in rounding only; others mean what they like."""
    return name in (None, "eager", "sdpa", "flex_attention") or str(name).startswith("flash_attention_")


def _altered(model: nn.Module, row: Family) -> str | None:
    """A part that is not as the table says: hooked, replaced or wrapped where packed rows would pass it by, or surprise it."""
    for module, is_layer in _parts(model):
        name = type(module).__name__
        if is_layer and not isinstance(module, Optimized):
            return f"{with_article(name)} is not optimised"
        if "forward" in module.__dict__ or not all(map(_trusted, _hooks(module))):
            return f"{with_article(name)} has a hook, which expects padded batches"
        if is_layer and (reason := _altered_inside(module, row)):
            return reason
    return None


def _parts(module: nn.Module) -> Iterator[tuple[nn.Module, bool]]:
    """The modules inside a base model, down to its layers, and whether each is one."""
    for inner in module.children():
        found = find(type(inner))
        is_layer = found is not None and found[1] == "layer"
        yield inner, is_layer
        if not is_layer:
            yield from _parts(inner)


def _altered_inside(layer: nn.Module, row: Family) -> str | None:
    source = stock_class(type(layer)).__module__
    for path in row.containers():
        inner = child(layer, path)
        if type(inner).__module__ != source:
            return f"{path} of a layer was replaced by {type(inner).__name__}"
        if not unhooked(inner) and not all(_hook_source(hook) == _CAPTURING for hook in _hooks(inner)):
            return f"{path} of a layer has a hook"
    if row.attention_dropout_called:
        dropout = child(layer, row.attention_dropout)
        if not plain(dropout, nn.Dropout) and not plain(dropout, nn.Identity):
            return f"{row.attention_dropout} of a layer, {with_article(type(dropout).__name__)}, has no probability to read"
    return None


_CAPTURING = "transformers.utils.output_capturing"  # these record attention weights, and do nothing unless asked to


def _hooks(module: nn.Module) -> list[Any]:
    groups = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return [hook for group in groups for hook in group.values()]


def _hook_source(hook: Any) -> str:
    return str(getattr(getattr(hook, "func", hook), "__module__", ""))


def _trusted(hook: Any) -> bool:
    """Libraries' hooks (sharding, offloading, capturing) do not care how tokens are laid out, but for one."""
    name = str(getattr(hook, "__name__", ""))
    if name == "neftune_post_forward_hook":  # its noise depends on the length that it sees
        return False
    # what transformers and peft hook on the embeddings for activation checkpointing, and scripts copy from them
    if name.startswith("make_inputs_require_grad"):
        return True
    return _hook_source(hook).split(".")[0] in ("torch", "transformers", "accelerate")


def _tell(door: nn.Module, reason: str) -> None:
    told = _STOCK_CALLS.setdefault(door, {})
    if reason not in told:
        told[reason] = None
        log.warning("%s: %s, so this call runs as stock transformers does (said once)", type(door).__name__, reason)


def stock_calls(door: nn.Module) -> tuple[str, ...]:
    """The reasons for which calls of this door ran as stock does, so far."""
    return tuple(_STOCK_CALLS.get(door, ()))


def always_stock(door: PaddingFreeModel) -> str | None:
    """The reason for which every call of this door runs as stock does, if there is one."""
    return _why_stock(door, door.stoker_row, {"input_ids": None})
