"""The override of a base model (BertModel, ...) that runs it without padding.

A batch (batch, length) becomes (1, tokens) with explicit positions. The stock forward runs over it, so that output classes,
hidden states and checkpointing stay transformers' own, and the result is laid out as (batch, length, width) again. A call
that cannot be split into sequences runs as in stock transformers, and a warning gives the reason once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from stoker.english import with_article
from stoker.kernels.tracing import stock_wanted
from stoker.model import precision
from stoker.model.any_model import ANY, tried
from stoker.model.attention_interface import NAME, CannotPack
from stoker.model.class_swap import (
    Optimized,
    accepts_keywords,
    child,
    named,
    parameter_names,
    plain,
    stock_class,
    unhooked,
)
from stoker.model.families import Family, find, transformers_major
from stoker.model.padding_warnings import warn_if_loss_uses_padding, warn_of_zeros
from stoker.model.recomputation import keeping_activations
from stoker.model.sequences import (
    Sequences,
    count,
    read_mask,
    read_sequence_ids,
    running,
    sequence_ids,
    wanted_by_head,
)

__all__ = ["PaddingFreeModel", "always_stock", "stock_calls"]

log = logging.getLogger("stoker")

_STOCK_CALLS: WeakKeyDictionary[nn.Module, dict[str, None]] = WeakKeyDictionary()
"""Cache of the reasons for which calls of a base model ran as stock does, so that each is logged once."""

_NEEDS_STOCK = {
    "past_key_values": "a cache is used",
    "encoder_hidden_states": "cross attention is used",
    "head_mask": "a head mask is given",
}
_PADDING_STAYS = "unpad=False, and the batch has padding"
_NO_PADDING = "the batch has no padding"
_TRIED: WeakKeyDictionary[nn.Module, str | None] = WeakKeyDictionary()
"""Cache: why a base model outside of the table cannot run without padding; None: it can."""

_BY_TOKEN = ("input_ids", "inputs_embeds", "token_type_ids", "position_ids")


class PaddingFreeModel(Optimized):
    """Override of a base model. With `unpad=False` it runs batches with padding as stock does."""

    stoker_part = "padding-free base model"
    stoker_model = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        call = named(self, args, kwargs)
        sequences = self._sequences(call)
        if isinstance(sequences, str):
            rows, length = _padded_shape(call)
            count(rows * length, rows * length, lambda: rows * length**2)
            with running(None):  # this model may be inside another one that runs padding-free
                return self._stock_forward(sequences, args, kwargs)
        count(sequences.batch * sequences.length, sequences.tokens, sequences.pairs)
        return_dict = call.pop("return_dict", getattr(self.config, "return_dict", True))
        head = wanted_by_head()
        if head.first_token and (last := self._last_layer(call, sequences)) is not None:
            sequences = dataclasses.replace(sequences, first_from=last)
        try:
            # No autocast inside: layers cast for themselves, and what is left is small.
            with running(sequences), torch.autocast("cpu", enabled=self._autocasts(sequences)), self._kept(sequences):
                output = super().forward(**self._packed(call, sequences))
                return self._unpacked(output, sequences, return_dict, head.packed)
        except CannotPack as error:  # found by a trial, unless a later call has another kind of mask
            _TRIED[self] = str(error)
            return self.forward(*args, **kwargs)

    def _last_layer(self, call: dict[str, Any], sequences: Sequences) -> nn.Module | None:
        """The layer after which the first token of each row is enough; None if there is no such layer or more is read."""
        row: Family = self.stoker_row
        if row is ANY or call.get("output_hidden_states", getattr(self.config, "output_hidden_states", False)):
            return None
        if sequences.mask is None and sequences.cu_seqlens.numel() != sequences.batch + 1:  # several sequences in a row
            return None
        return next((module for module, is_layer in reversed(list(_parts(self))) if is_layer), None)

    def _kept(self, sequences: Sequences) -> contextlib.AbstractContextManager[None]:
        if not self.stoker_settings.keep_activations:
            return contextlib.nullcontext()
        return keeping_activations(self, sequences.tokens, sequences.dtype.itemsize)

    def _autocasts(self, sequences: Sequences) -> bool:
        """The layers of a model outside of the table are stock, so mixed precision is autocast's affair there."""
        return self.stoker_row is ANY and sequences.dtype != next(self.parameters()).dtype

    def _stock_forward(self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if reason not in (_PADDING_STAYS, _NO_PADDING):
            _warn_once(self, reason)
            return super().forward(*args, **kwargs)
        stored = next(self.parameters()).dtype
        dtype = precision.activations(self.stoker_settings.dtype, stored)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype != stored):
            output = super().forward(*args, **kwargs)
        return output if dtype == stored else _cast(output, stored)

    def _sequences(self, call: dict[str, Any]) -> Sequences | str:
        """The sequences of this call's batch, or the reason why it has to run as stock does."""
        if reason := _why_stock(self, call):
            return reason
        tokens = call["input_ids"] if "input_ids" in call else call["inputs_embeds"]
        mask = call.get("attention_mask")
        for name, x in (("batch", tokens), ("attention mask", mask)):
            if type(x) not in (Tensor, nn.Parameter, type(None)):  # FakeTensor, DTensor, ...: values cannot be read
                return f"the {name} is {with_article(type(x).__name__)}"
        batch, length = tokens.shape[:2]
        if not tokens.numel():
            return "the batch is empty"
        if mask is not None and tuple(mask.shape) != (batch, length):
            return f"the attention mask has {mask.dim()} dimensions and is not (batch, length)"
        parameter = next(self.parameters(), None)
        if parameter is None:
            return "the model has no parameters of its own"
        if parameter.device.type != "cpu" or parameter.dtype not in (torch.float32, torch.bfloat16):
            return f"the model is {parameter.dtype} on {parameter.device}"
        settings = self.stoker_settings
        if not settings.unpad and mask is not None and not bool(mask.all()):
            return _PADDING_STAYS
        row: Family = self.stoker_row
        dtype = precision.activations(settings.dtype, parameter.dtype)
        if mask is None and (ids := _sequence_ids(call, row, (batch, length))) is not None:
            return _NO_PADDING if row is ANY else read_sequence_ids(ids, dtype=dtype)
        sequences = read_mask(mask, batch, length, dtype=dtype, device=tokens.device)
        if row is ANY and isinstance(sequences, Sequences):
            return _NO_PADDING if sequences.mask is None else self._tried(call) or sequences
        return sequences

    def _tried(self, call: dict[str, Any]) -> str | None:
        """Why this model, which is not in the table, cannot run without padding; None if it can."""
        if self not in _TRIED:
            _TRIED[self] = None  # for the trial itself
            with running(None):  # a head around this model would take packed hidden states
                _TRIED[self] = tried(self, call, lambda short: self.forward(**short))
        return _TRIED[self]

    def _packed(self, call: dict[str, Any], sequences: Sequences) -> dict[str, Any]:
        """The arguments of the stock forward for the packed batch."""
        row: Family = self.stoker_row
        packed: dict[str, Any] = {name: sequences.pack(call[name]) for name in _BY_TOKEN if name in call}
        if "position_ids" not in packed:
            positions = sequences.positions
            if row.positions_after_padding:
                embeddings: Any = self.embeddings
                positions = sequences.positions_after(embeddings.padding_idx, packed.get("input_ids"))
            packed["position_ids"] = positions.unsqueeze(0)
        if "token_type_ids" not in packed and transformers_major() < 5 and _has_types(self):
            # transformers 4 would take them from a buffer that is no longer than the longest sequence
            packed["token_type_ids"] = torch.zeros_like(packed["position_ids"])
        if accepts_keywords(type(self)):
            packed["stoker_sequences"] = sequences
        if row.causal or (row is ANY and "use_cache" in parameter_names(type(self))):
            packed["use_cache"] = False  # its default may be True, but a training step has no use for a cache
        return {**call, **packed, "attention_mask": row.empty_mask, "return_dict": True}

    def _unpacked(self, output: Any, sequences: Sequences, return_dict: bool, keep_packed: bool) -> Any:
        """The output of the stock forward, laid out again as (batch, length, width), the last tensor as the head takes it."""
        row: Family = self.stoker_row
        dtype = next(self.parameters()).dtype
        done: dict[int, Tensor] = {}  # the last of the hidden states is the output itself

        def unpack(x: Tensor) -> Tensor:
            if id(x) not in done:
                done[id(x)] = sequences.unpack(x.to(dtype))
                warn_if_loss_uses_padding(self, done[id(x)], sequences)
            return done[id(x)]

        if sequences.first_from is not None:
            hidden = sequences.unpack_firsts(output.last_hidden_state.to(dtype))
        else:
            hidden = output.last_hidden_state if keep_packed else unpack(output.last_hidden_state)
        if states := output.get("hidden_states"):
            if sequences.mask is not None:
                warn_of_zeros(self, "it returns hidden_states")
            output.hidden_states = tuple(state if state is None else unpack(state) for state in states)
        output.last_hidden_state = hidden
        if output.get("pooler_output") is not None:
            # stock pooled only the first token of the packed batch, but every sequence has one
            output.pooler_output = row.pooled(self, hidden)
        if return_dict:
            return output
        if row.pooler_slot_until >= transformers_major():
            rest = (value for name, value in output.items() if name not in ("last_hidden_state", "pooler_output"))
            return (hidden, output.get("pooler_output"), *rest)
        return output.to_tuple()


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """The output of a model, or a part of it, with its floating-point tensors converted to `dtype`."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, tuple):
        return tuple(_cast(one, dtype) for one in value)
    if isinstance(value, dict):
        for name, one in list(value.items()):
            value[name] = _cast(one, dtype)
    return value


def _padded_shape(call: dict[str, Any]) -> tuple[int, int]:
    """Rows and positions of a call that computes its padding."""
    tokens = call.get("input_ids", call.get("inputs_embeds"))
    return (tokens.shape[0], tokens.shape[1]) if isinstance(tokens, Tensor) and tokens.dim() > 1 else (0, 0)


def _has_types(model: Any) -> bool:
    return hasattr(getattr(model, "embeddings", None), "token_type_embeddings")


def _why_stock(model: Any, call: dict[str, Any]) -> str | None:
    """The reason why a call has to run as stock does, as far as its arguments (not their values) and the modules tell."""
    config = model.config
    for name, reason in _NEEDS_STOCK.items():
        if name in call:
            return reason
    row: Family = model.stoker_row
    if row.needs_stock is not None and (always := row.needs_stock(model)):
        return always
    if call.get("use_cache"):
        return "a cache is requested"
    if row is not ANY and (other := _other_attention(config, call, row.causal)):
        return other
    if call.get("output_attentions", getattr(config, "output_attentions", False)):
        return "output_attentions is set, but attention weights are never computed"
    if getattr(config, "position_embedding_type", None) not in (None, "absolute"):
        return f"position_embedding_type is {config.position_embedding_type!r}"
    implementation = getattr(config, "_attn_implementation", None)
    if not _known_attention(implementation):
        return f"the attention implementation {implementation!r} is not transformers' own"
    if row is ANY and implementation != NAME:
        return f"its attention implementation, {implementation!r}, was chosen by the user"
    if getattr(call.get("position_ids"), "ndim", 2) > 2:
        return "position_ids has more than two dimensions"
    if ("input_ids" in call) == ("inputs_embeds" in call):
        return "not exactly one of input_ids and inputs_embeds is given"  # stock raises an error
    if stock_wanted():
        return "the model is being traced, exported or transformed"
    return _TRIED.get(model) or _altered(model, row)


def _other_attention(config: Any, call: dict[str, Any], causal: bool) -> str | None:
    """The reason why the fused layers of a family would not compute the attention that this model is configured for."""
    if getattr(config, "is_decoder", False) and not causal:
        return "the model is a decoder"
    if getattr(config, "use_bidirectional_attention", False):
        return "attention is bidirectional"
    if bool(call.get("is_causal", getattr(config, "is_causal", causal))) != causal:
        return "attention is not causal" if causal else "attention is causal"
    return None


def _known_attention(name: str | None) -> bool:
    """Whether this is one of transformers' implementations, which differ in rounding only. Others may compute anything."""
    return name in (None, "eager", "sdpa", "flex_attention", NAME) or str(name).startswith("flash_attention_")


def _sequence_ids(call: dict[str, Any], row: Family, shape: tuple[int, int]) -> Tensor | None:
    """The numbers of the sequences in a batch that was packed before the model, as transformers recognizes it; else None."""
    ends = call.get("cu_seq_lens_q")
    if isinstance(ends, Tensor) and shape[0] == 1 and int(ends[-1]) == shape[1]:
        return sequence_ids(ends)
    positions = call.get("position_ids")
    if not row.causal or not isinstance(positions, Tensor) or positions.dim() != 2 or positions.shape[1] != shape[1]:
        return None
    ids = torch.nn.functional.pad((torch.diff(positions) != 1).cumsum(1), (1, 0))
    return ids.expand(shape) if bool(ids[:, -1].any()) else None


def _altered(model: nn.Module, row: Family) -> str | None:
    """The first part that is not as the table says: a hook or wrapper that would be skipped or see packed rows."""
    for module, is_layer in _parts(model):
        name = type(module).__name__
        if is_layer and not isinstance(module, Optimized):
            return f"{with_article(name)} is not optimized"
        if "forward" in module.__dict__ or not all(map(_trusted, _hooks(module))):
            return f"{with_article(name)} has a hook, which may expect padded batches"
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
            return (
                f"{row.attention_dropout} of a layer, {with_article(type(dropout).__name__)}, has no known probability"
            )
    return None


_CAPTURING = "transformers.utils.output_capturing"  # its hooks record attention weights, and only on request


def _hooks(module: nn.Module) -> list[Any]:
    groups = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return [hook for group in groups for hook in group.values()]


def _hook_source(hook: Any) -> str:
    return str(getattr(getattr(hook, "func", hook), "__module__", ""))


def _trusted(hook: Any) -> bool:
    """Hooks of libraries (sharding, offloading, capturing) do not depend on how tokens are laid out, with one exception."""
    name = str(getattr(hook, "__name__", ""))
    if name == "neftune_post_forward_hook":  # its noise depends on the padded length
        return False
    # the hook that transformers, peft and scripts put on the embeddings for activation checkpointing
    if name.startswith("make_inputs_require_grad"):
        return True
    return _hook_source(hook).split(".")[0] in ("torch", "transformers", "accelerate")


def _warn_once(model: nn.Module, reason: str) -> None:
    reasons = _STOCK_CALLS.setdefault(model, {})
    if reason not in reasons:
        reasons[reason] = None
        log.warning(
            "%s: this call runs as stock transformers does, because %s (logged once)", type(model).__name__, reason
        )


def stock_calls(model: nn.Module) -> tuple[str, ...]:
    """The reasons for which calls of this base model have run as stock does so far."""
    return tuple(_STOCK_CALLS.get(model, ()))


def always_stock(model: PaddingFreeModel) -> str | None:
    """The reason for which every call of this base model runs as stock does, if there is one."""
    return _why_stock(model, {"input_ids": None})
