"""The attention implementation "stoker" of transformers: `from_pretrained(..., attn_implementation="stoker")`.

transformers' AttentionInterface and AttentionMaskInterface let a model name the function that computes attention and the one
that builds its mask. Ours builds no (length, length) mask: it passes on which positions are padding, or which packed sequence
a position belongs to, and attention runs over the sequences alone. A call that the kernel does not support (a cache, an
unusual mask, another device) runs as transformers' own implementation does, and so gets the mask that one needs. A model that
asks for a mask but not for an attention function keeps the mask of its eager attention.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from stoker.kernels.attention import attention
from stoker.kernels.tracing import stock_wanted
from stoker.model.families import transformers_major
from stoker.model.sequences import Sequences, read_mask, read_sequence_ids, running_sequences, sequence_ids
from stoker.requires import supported

__all__ = ["NAME", "CannotPack", "available", "register"]

NAME = "stoker"


class CannotPack(Exception):
    """A model's mask or attention is such that its batch cannot be packed; the base model then runs as stock does."""


def available() -> bool:
    """Whether the installed transformers has the interface as it is used here; earlier versions than 5 do not."""
    return transformers_major() >= 5 and supported("attention interface")


def register() -> None:
    """Makes the implementation known to transformers, if it is available."""
    if not available():
        return
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(NAME, stoker_attention)
    AttentionMaskInterface.register(NAME, stoker_mask)


# --- The mask


def stoker_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """None, a mask (batch, length) of real tokens or of sequence numbers, or the mask that transformers' sdpa takes.

    A mask of two dimensions says nothing about causality, which a model passes to the attention function too. The window
    is an attribute of it, because not all models do.
    """
    from transformers.masking_utils import eager_mask, sdpa_mask

    if _computes_its_own_attention(kwargs.get("config")):
        return eager_mask(  # type: ignore[no-any-return]
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, **kwargs
        )
    stock = stock_wanted()
    kinds = {} if stock else dict(_conditions(mask_function))
    whole = q_length == kv_length and all(isinstance(offset, int) and not offset for offset in (q_offset, kv_offset))
    if stock or not whole or not kinds.keys() <= _UNDERSTOOD or kwargs.get("use_vmap"):
        if running_sequences() is not None:
            raise CannotPack("its attention mask is of an unusual kind")
        # Never left out: the attention function takes a missing mask for one of ours.
        whole_mask = {**kwargs, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        return sdpa_mask(  # type: ignore[no-any-return]
            batch_size,
            q_length,
            kv_length,
            q_offset,
            kv_offset,
            mask_function,
            attention_mask,
            local_size,
            **whole_mask,
        )
    mask = kinds.get(_PACKED)
    if mask is None and attention_mask is not None and not bool(attention_mask.all()):
        mask = attention_mask.bool()
    if local_size is None or local_size >= q_length:
        return mask
    mask = torch.ones(batch_size, q_length, dtype=torch.bool) if mask is None else mask.clone()
    # including the token itself, as modules count; transformers' mask for both sides does not
    setattr(mask, "stoker_window", local_size + (_BOTH_SIDES in kinds))  # noqa: B010
    return mask


def _computes_its_own_attention(config: Any) -> bool:
    """Whether the code of this configuration's model never looks up an attention implementation.

    BLOOM, CodeGen, MPNet and others build their mask through transformers, but their layers take an eager one only.
    """
    code = sys.modules.get(type(config).__module__.replace(".configuration_", ".modeling_"))
    return hasattr(code, "PreTrainedModel") and not hasattr(code, "ALL_ATTENTION_FUNCTIONS")


_PACKED = "packed_sequence_mask_function"
_BOTH_SIDES = "sliding_window_bidirectional_overlay"
# transformers 5.23 and newer: the same conditions on positions that restart with each packed sequence, as our kernel counts them
_RESTARTING = "remap_positions_for_packed_sequence"
_UNDERSTOOD = {_PACKED, _BOTH_SIDES, "causal_mask_function", "bidirectional_mask_function", "sliding_window_overlay"}


def _conditions(function: Any) -> Iterator[tuple[str, Any]]:
    """The names of the functions that transformers has joined by `and_masks`, each with the value it was made from."""
    name = getattr(function, "__qualname__", "").partition(".")[0]
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    if name == "and_masks" and cells and isinstance(cells[0], tuple):
        for inner in cells[0]:
            yield from _conditions(inner)
    elif name == _RESTARTING and cells and callable(cells[0]):
        yield from _conditions(cells[0])
    else:
        yield name, cells[0] if cells else None


# --- Attention


def stoker_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    stoker_sequences: Sequences | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention of q (batch, heads, length, size); returns (batch, length, heads, size), and None for the weights."""
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    window = sliding_window or getattr(attention_mask, "stoker_window", None)
    queries = keys = stoker_sequences
    if queries is None:
        if running_sequences() is not None:
            raise CannotPack("its layers do not pass keyword arguments on to attention")
        query, key, value = _as_autocast(query, key, value)
        if _supported(module, query, key, value, attention_mask, position_bias, causal, kwargs):
            queries, keys = _read(query, key, attention_mask, kwargs)
    if queries is None or keys is None:
        others = {"softcap": softcap, "s_aux": s_aux, "position_bias": position_bias}
        given = {name: value for name, value in others.items() if value is not None}
        mask = _full_mask(query, attention_mask, causal, window)
        return _stock(module, query, key, value, mask, is_causal, dropout=dropout, scaling=scaling, **given, **kwargs)
    packed = stoker_sequences is not None
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out = attention(
        q.squeeze(0) if packed else queries.pack(q).squeeze(0),
        k.squeeze(0) if packed else keys.pack(k).squeeze(0),
        v.squeeze(0) if packed else keys.pack(v).squeeze(0),
        queries.cu_seqlens,
        causal=causal and queries is keys,
        window=None if window is None else (window - 1, window - 1),  # it includes the token itself
        bias=None if position_bias is None else position_bias[0].float(),
        scale=scaling,
        dropout_p=dropout,
        softcap=softcap,
        sinks=None if s_aux is None else s_aux.float(),
        cu_seqlens_k=None if queries is keys else keys.cu_seqlens,
    )
    return (out if packed else queries.lay_out(out)).view(*q.shape[:2], *out.shape[1:]), None


def _as_autocast(*given: Tensor) -> tuple[Tensor, ...]:
    """Inside bf16 autocast, queries and keys are often fp32 and values bf16; autocast makes all of them bf16 for sdpa."""
    if not torch.is_autocast_enabled("cpu") or torch.get_autocast_dtype("cpu") != torch.bfloat16:
        return given
    return tuple(one.to(torch.bfloat16) if one.dtype == torch.float32 else one for one in given)


def _supported(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    bias: Any,
    causal: bool,
    kwargs: dict[str, Any],
) -> bool:
    """Whether the kernel computes this call; if not, transformers' own implementation does."""
    if stock_wanted() or query.device.type != "cpu" or query.dtype not in (torch.float32, torch.bfloat16):
        return False
    if kwargs.get("output_attentions") or kwargs.get("cache") is not None or not query.numel():
        return False
    if not (query.dtype == key.dtype == value.dtype) or not (query.shape[-1] == key.shape[-1] == value.shape[-1]):
        return False
    if mask is not None and (type(mask) is not Tensor or mask.dim() != 2):
        return False
    if query.shape[2] != key.shape[2]:
        return not causal and bias is None  # cross attention; with causal attention it would be a cache
    if mask is not None and not causal and _crosses(module):
        return False  # whether the mask is that of the queries too, or of the keys alone, cannot be told
    return bias is None or (bias.shape[0] == 1 and bias.shape[2] == bias.shape[3] == query.shape[2])


def _crosses(module: nn.Module) -> bool:
    """Whether the model of this attention layer also has attention over another model's hidden states."""
    config = getattr(module, "config", None)
    return any(getattr(config, name, False) for name in ("is_encoder_decoder", "is_decoder", "add_cross_attention"))


def _read(
    query: Tensor, key: Tensor, mask: Tensor | None, kwargs: dict[str, Any]
) -> tuple[Sequences | None, Sequences | None]:
    """The sequences of the queries and of the keys, which are the same unless this is cross attention."""
    if query.shape[2] != key.shape[2]:
        return _sequences(None, query), _sequences(mask, key)
    ends: Any = kwargs.get("cu_seq_lens_q")
    flat = isinstance(ends, Tensor) and query.shape[0] == 1 and int(ends[-1]) == query.shape[2]
    if flat and (mask is None or (mask.dtype == torch.bool and bool(mask.all()))):  # it may only give the window
        mask = sequence_ids(ends)
    found = _sequences(mask, query)
    return found, found


def _sequences(mask: Tensor | None, of: Tensor) -> Sequences | None:
    """None if the batch cannot be split into sequences. A mask is read once: all layers of a call are given the same one."""
    if hasattr(mask, "stoker_read"):
        return mask.stoker_read  # type: ignore[no-any-return, union-attr]
    batch, length = of.shape[0], of.shape[2]
    if mask is not None and mask.dtype != torch.bool:
        found: Sequences | str = read_sequence_ids(mask.expand(batch, length), dtype=of.dtype)
    else:
        found = read_mask(mask, batch, length, dtype=of.dtype, device=of.device)
    result = found if isinstance(found, Sequences) else None
    if mask is not None:
        mask.stoker_read = result  # type: ignore[attr-defined]
    return result


def _full_mask(query: Tensor, mask: Tensor | None, causal: bool, window: int | None) -> Tensor | None:
    """One of our masks as transformers' own implementations take it: (batch, 1, length, length), True where a key is seen."""
    if (mask is None and window is None) or (mask is not None and mask.dim() != 2):
        return mask
    length = query.shape[2]
    distance = torch.arange(length)[:, None] - torch.arange(length)
    seen = (distance >= 0) if causal else torch.ones(length, length, dtype=torch.bool)
    if window is not None:
        seen = seen & (distance.abs() < window)
    seen = seen.to(query.device).expand(query.shape[0], 1, length, length)
    if mask is None:
        return seen
    if mask.dtype != torch.bool:
        return seen & (mask[:, None, :, None] == mask[:, None, None, :])
    return seen & mask[:, None, None, :].to(query.device)


def _stock(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool | None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """transformers' sdpa, or the model's own eager attention for what sdpa lacks."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if options.get("softcap") is None and options.get("s_aux") is None:
        return sdpa_attention_forward(module, query, key, value, mask, is_causal=is_causal, **options)  # type: ignore[no-any-return]
    eager: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if eager is None:
        raise NotImplementedError(
            f"attn_implementation='stoker': {type(module).__name__} needs a softcap or attention sinks in a call that "
            "the kernel cannot compute, and the model has no eager attention; use another attn_implementation"
        )
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=query.dtype).masked_fill(~mask, torch.finfo(query.dtype).min)
    return eager(module, query, key, value, mask, **options)  # type: ignore[no-any-return]
