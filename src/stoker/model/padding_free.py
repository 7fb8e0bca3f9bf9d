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
from stoker.errors import one_line
from stoker.kernels.tracing import stock_wanted
from stoker.model import precision
from stoker.model.any_model import ANY, Kind, kind_of_call, leaves, per_token, tried
from stoker.model.attention_interface import NAME, CannotPack, LazyMask, stock_implementation
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
from stoker.model.known_parts import KnownAttention
from stoker.model.module_watch import Watch
from stoker.model.padding_readers import PaddingReaders, StockStates, warn_of_zeros
from stoker.model.recomputation import keeping_activations
from stoker.model.sequences import (
    HeadCall,
    Sequences,
    count,
    read_mask,
    read_sequence_ids,
    running,
    sequence_ids,
    wanted_by_head,
)
from stoker.model.stock_twin import stock_twin
from stoker.streams import above_progress_bars

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
_PADDING_READ = "hidden states at padding are read, or may be"
_TRIED: WeakKeyDictionary[nn.Module, dict[Kind, str | None]] = WeakKeyDictionary()
"""Cache: why a base model outside of the table cannot run a kind of call without padding; None: it can."""

_STATES: WeakKeyDictionary[nn.Module, tuple[Watch, str | None]] = WeakKeyDictionary()
"""Cache: what was found in the modules of a base model, and the watch that tells whether it still holds."""

_KNOWN_ATTENTION: WeakKeyDictionary[Watch, list[KnownAttention]] = WeakKeyDictionary()
"""Cache: the modules of that class in a model outside of the table, as long as the watch holds."""

_BY_TOKEN = ("input_ids", "inputs_embeds", "token_type_ids", "position_ids")
"""Arguments of all base models in the table."""


class PaddingFreeModel(Optimized):
    """Override of a base model. With `unpad=False` it runs batches with padding as stock does."""

    stoker_part = "padding-free base model"
    stoker_model = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        call = named(self, args, kwargs)
        sequences = self._sequences(call)
        head = wanted_by_head()
        readers = None if isinstance(sequences, str) else self._readers(call, sequences, head)
        if readers is not None and readers.plan == "stock":
            return self._read_at_padding(readers, args, kwargs)
        if isinstance(sequences, str):
            rows, length = _padded_shape(call)
            count(rows * length, rows * length, lambda: rows * length**2)
            with running(None):  # this model may be inside another one that runs padding-free
                return self._stock_forward(sequences, args, kwargs)
        count(sequences.batch * sequences.length, sequences.tokens, sequences.pairs)
        return_dict = call.pop("return_dict", getattr(self.config, "return_dict", True))
        if head.first_token and (last := self._last_layer(call, sequences)) is not None:
            sequences = dataclasses.replace(sequences, first_from=last)
        sequences.shared[Watch] = _STATES[self][0]
        try:
            return self.stoker_packed(call, sequences, return_dict, head.packed, readers)
        except CannotPack as error:  # found by a trial, unless a later call has another kind of mask
            reason = str(error)
        except Exception as error:
            if self.stoker_row is not ANY:
                raise
            # foreign code: if it is the batch that is wrong, stock raises the same
            reason = f"packed rows failed with {type(error).__name__}: {one_line(error)}"
        # calls like this one run as stock from now on
        _TRIED.setdefault(self, {})[kind_of_call(self, call, sequences.longest, sequences.dtype)] = reason
        with running(None):
            return self._stock_forward(reason, args, kwargs)

    def stoker_packed(
        self,
        call: dict[str, Any],
        sequences: Sequences,
        return_dict: bool = True,
        keep_packed: bool = False,
        readers: PaddingReaders | None = None,
    ) -> Any:
        """The output of a call, computed over the sequences alone."""
        # No autocast inside: layers cast for themselves, and what is left is small.
        with running(sequences), torch.autocast("cpu", enabled=self._autocasts(sequences)), self._kept(sequences):
            output = super().forward(**self._packed(call, sequences))
            laid_out = {} if readers is None else self._laid_out(output, sequences, readers, call)
            return self._unpacked(output, sequences, return_dict, keep_packed, laid_out)

    def _last_layer(self, call: dict[str, Any], sequences: Sequences) -> nn.Module | None:
        """The layer after which the first token of each row is enough; None if there is no such layer or more is read."""
        row: Family = self.stoker_row
        if row is ANY or self._returns_states(call):
            return None
        if sequences.mask is None and sequences.cu_seqlens.numel() != sequences.batch + 1:  # several sequences in a row
            return None
        return next((module for module, is_layer in reversed(list(_parts(self))) if is_layer), None)

    def _returns_states(self, call: dict[str, Any]) -> bool:
        return bool(call.get("output_hidden_states", getattr(self.config, "output_hidden_states", False)))

    def _readers(self, call: dict[str, Any], sequences: Sequences, head: HeadCall) -> PaddingReaders | None:
        """Who reads hidden states at padding; None if there is none, or if nobody gets to see it."""
        ignored = head.packed or head.first_token or head.masks_padding
        return None if ignored and not self._returns_states(call) else PaddingReaders.of(self, call, sequences)

    def _read_at_padding(self, readers: PaddingReaders, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The call as stock computes it, padding included."""
        if readers.reason:
            _warn_once(self, readers.reason)
        rows, length = readers.padding.shape
        count(rows * length, rows * length, lambda: rows * length**2)
        with running(None):
            if self.stoker_row is ANY:  # its layers have Stoker's attention, which gives zeros at padding
                output = stock_twin(self, hooked=True, checkpointed=True).forward(*args, **kwargs)
            else:
                output = self._stock_forward(_PADDING_READ, args, kwargs)
        readers.watch(output)
        return output

    def _laid_out(
        self, output: Any, sequences: Sequences, readers: PaddingReaders, call: dict[str, Any]
    ) -> dict[int, Tensor]:
        """The hidden states of the packed output as (batch, length, width), by the id of the packed ones."""
        dtype = next(self.parameters()).dtype
        packed = _states(output)
        states = [sequences.unpack(state.to(dtype)) for state in packed]
        if readers.plan == "both":
            states = readers.fill(states, self._stock_states(call, sequences))
        elif len(states) > 1:
            warn_of_zeros(self, "it returns hidden_states")
        readers.watch(tuple(states))
        return dict(zip(map(id, packed), states, strict=True))

    def _stock_states(self, call: dict[str, Any], sequences: Sequences) -> StockStates:
        """The hidden states of this call as stock computes them, padding included."""
        others = {"use_cache": False} if "use_cache" in parameter_names(type(self)) else {}
        stored = next(self.parameters()).dtype

        def run() -> list[Tensor]:
            twin = stock_twin(self, hooked=False, checkpointed=False)
            # a cast of a weight that autocast had cached without a gradient would be found by the layers that need one
            precise = torch.autocast("cpu", torch.bfloat16, enabled=sequences.dtype != stored, cache_enabled=False)
            with running(None), precise:
                output = twin.forward(**{**call, **others, "return_dict": True})
            return [state.to(stored) for state in _states(output)]

        return StockStates.of(self, call, run)

    def _kept(self, sequences: Sequences) -> contextlib.AbstractContextManager[None]:
        if not self.stoker_settings.keep_activations:
            return contextlib.nullcontext()
        return keeping_activations(self, sequences.tokens, sequences.dtype.itemsize)

    def _autocasts(self, sequences: Sequences) -> bool:
        """The layers of a model outside of the table are stock, so mixed precision is autocast's affair there."""
        return self.stoker_row is ANY and sequences.dtype != next(self.parameters()).dtype

    def _stock_forward(self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if reason not in (_PADDING_STAYS, _NO_PADDING, _PADDING_READ):
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
            if type(x) not in (
                Tensor,
                nn.Parameter,
                LazyMask,
                type(None),
            ):  # FakeTensor, DTensor, ...: values cannot be read
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
            if sequences.mask is not None:
                return self._tried(call, sequences) or sequences
            # given positions may start again within a row: then a row is not a sequence
            gains = "position_ids" not in call and _gains_by_packing(self)
            return sequences if gains and self._tried(call, sequences) is None else _NO_PADDING
        return sequences

    def _tried(self, call: dict[str, Any], sequences: Sequences) -> str | None:
        """Why this model, which is not in the table, cannot run this call without padding; None if it can."""
        by_token = per_token(call, (sequences.batch, sequences.length))
        if isinstance(by_token, str):
            return by_token
        if sequences.longest < 2:
            return "the batch is too short to try the model without padding"
        results = _TRIED.setdefault(self, {})
        kind = kind_of_call(self, call, sequences.longest, sequences.dtype)
        if kind not in results:
            mask = sequences.mask
            if mask is None:
                mask = torch.ones(sequences.batch, sequences.length, dtype=torch.bool)
            with running(None):  # a head around this model would take packed hidden states
                results[kind] = tried(self, call, mask, kind, _try_packed)
        return results[kind]

    def _packed(self, call: dict[str, Any], sequences: Sequences) -> dict[str, Any]:
        """The arguments of the stock forward for the packed batch."""
        row: Family = self.stoker_row
        by_token = per_token(call, (sequences.batch, sequences.length)) if row is ANY else _BY_TOKEN
        packed: dict[str, Any] = {name: sequences.pack(call[name]) for name in by_token if name in call}
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

    def _unpacked(
        self, output: Any, sequences: Sequences, return_dict: bool, keep_packed: bool, done: dict[int, Tensor]
    ) -> Any:
        """The output of the stock forward, laid out again as (batch, length, width), the last tensor as the head takes it."""
        row: Family = self.stoker_row
        if row is ANY and (not hasattr(output, "get") or output.get("last_hidden_state") is None):
            raise CannotPack("it returns no last hidden state")
        if row is ANY and _is_filled(output.get("past_key_values")):  # it was told not to
            raise CannotPack("it fills a cache, whose rows would be packed, in every call")
        dtype = next(self.parameters()).dtype

        def unpack(x: Tensor) -> Tensor:
            if id(x) not in done:  # the last of the hidden states is the output itself
                done[id(x)] = sequences.unpack(x.to(dtype))
            return done[id(x)]

        if sequences.first_from is not None:
            hidden = sequences.unpack_firsts(output.last_hidden_state.to(dtype))
        else:
            hidden = output.last_hidden_state if keep_packed else unpack(output.last_hidden_state)
        if states := output.get("hidden_states"):
            output.hidden_states = tuple(state if state is None else unpack(state) for state in states)
        output.last_hidden_state = hidden
        if row is ANY:
            _lay_out_others(output, sequences)
            if output.get("pooler_output") is not None and not hasattr(self, "pooler"):
                raise CannotPack("it has a way of its own to pool hidden states")
        if output.get("pooler_output") is not None and not keep_packed:
            # stock pooled only the first token of the packed batch, but every sequence has one
            output.pooler_output = row.pooled(self, hidden)
        if return_dict:
            return output
        if row.pooler_slot_until >= transformers_major():
            rest = (value for name, value in output.items() if name not in ("last_hidden_state", "pooler_output"))
            return (hidden, output.get("pooler_output"), *rest)
        return output.to_tuple()


def _is_filled(cache: Any) -> bool:
    if hasattr(cache, "get_seq_length"):
        return bool(cache.get_seq_length())
    return any(isinstance(one, Tensor) for one in leaves(cache))


def _try_packed(model: Any, call: dict[str, Any], mask: Tensor) -> Any:
    """The output of a call that is known to have padding, as a trial takes it."""
    stored = next(model.parameters()).dtype
    dtype = torch.bfloat16 if torch.is_autocast_enabled("cpu") and stored == torch.float32 else stored
    sequences = read_mask(mask, *mask.shape, dtype=dtype, device=mask.device)
    assert isinstance(sequences, Sequences)
    sequences.shared[Watch] = Watch(model)  # so that the trial runs what training runs
    return model.stoker_packed(call, sequences)


def _lay_out_others(output: Any, sequences: Sequences) -> None:
    """Lays out whatever else a model returned for each packed row, such as the logits of a router."""

    def laid_out(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(laid_out, value))
        if isinstance(value, Tensor) and value.shape[:1] == (sequences.tokens,):  # as (batch * length, width)
            return sequences.lay_out(value)
        if isinstance(value, Tensor) and value.shape[:2] == (1, sequences.tokens):
            return sequences.lay_out(value.squeeze(0)).view(sequences.batch, sequences.length, *value.shape[2:])
        return value

    for name in list(output):
        if name not in ("last_hidden_state", "hidden_states", "pooler_output"):
            output[name] = laid_out(output[name])


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


def _states(output: Any) -> list[Tensor]:
    """The last hidden state and, if the output has them, those of all layers."""
    states = (output.last_hidden_state, *(output.get("hidden_states") or ()))
    return list({id(state): state for state in states if state is not None}.values())  # the last one is there twice


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
        if implementation == "eager" == stock_implementation(config):
            return f"its attention implementation is {implementation!r}, the only one of transformers that it supports"
        return f"its attention implementation, {implementation!r}, was chosen by the user"
    if getattr(call.get("position_ids"), "ndim", 2) > 2:
        return "position_ids has more than two dimensions"
    if ("input_ids" in call) == ("inputs_embeds" in call):
        return "not exactly one of input_ids and inputs_embeds is given"  # stock raises an error
    if stock_wanted():
        return "the model is being traced, exported or transformed"
    return _state(model, row)[1]


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


def _gains_by_packing(model: nn.Module) -> bool:
    """Whether a model outside of the table is faster over packed rows even if there is no padding to skip."""
    watch = _STATES[model][0]
    if (known := _KNOWN_ATTENTION.get(watch)) is None:
        known = _KNOWN_ATTENTION[watch] = [module for module in model.modules() if isinstance(module, KnownAttention)]
    # without a mask stock attention follows this flag
    return bool(known) and all(getattr(module, "is_causal", None) is True for module in known)


def _state(model: nn.Module, row: Family) -> tuple[Watch, str | None]:
    """A watch that holds, and what it holds for: why the model has to run as stock does, None if it need not."""
    known = _STATES.get(model)
    if known is None or not known[0].unchanged():
        known = _STATES[model] = Watch(model), _altered(model, row)
    return known


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
        with above_progress_bars():
            log.warning(
                "%s: this call runs as stock transformers does, because %s (logged once)", type(model).__name__, reason
            )


def stock_calls(model: nn.Module) -> tuple[str, ...]:
    """The reasons for which calls of this base model have run as stock does so far."""
    return tuple(_STOCK_CALLS.get(model, ()))


def always_stock(model: PaddingFreeModel) -> str | None:
    """The reason for which every call of this base model runs as stock does, if there is one."""
    results = list(_TRIED.get(model, {}).values())
    failed = results[0] if results and all(results) else None
    return _why_stock(model, {"input_ids": None}) or failed
