"""The attention implementation "stoker" of transformers: `from_pretrained(..., attn_implementation="stoker")`.

transformers' AttentionInterface and AttentionMaskInterface let a model name the function that computes attention and the one
that builds its mask. Ours builds a (length, length) mask only if somebody reads its values (`LazyMask`): the attention function
asks it which keys a query sees, and runs over the sequences alone. What a query sees comes from the model's mask, as in
stock; without one, from what the stock implementation makes of that. Where stock has no mask there is none here either: code
that asks `attention_mask is None` must get the same answer. A call that the kernel does not support (a cache, an
unusual mask, another device) runs as transformers' own implementation does, with the mask that one needs. A model that asks
for a mask but not for an attention function keeps the mask of its eager attention.
"""

from __future__ import annotations

import inspect
import logging
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stoker.kernels.attention import attention
from stoker.kernels.tracing import stock_wanted
from stoker.model.class_swap import cached
from stoker.model.config_view import is_view, original
from stoker.model.families import transformers_major
from stoker.model.sequences import Sequences, read_mask, read_sequence_ids, running_sequences, sequence_ids
from stoker.requires import supported

__all__ = [
    "NAME",
    "CannotPack",
    "LazyMask",
    "available",
    "lists_implementations",
    "register",
    "sees_all_before",
    "stock_implementation",
]

NAME = "stoker"

log = logging.getLogger("stoker")


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


def stock_implementation(config: Any) -> str:
    """The implementation that a model with this configuration would use without Stoker: "sdpa" or "eager"."""
    if is_view(config):
        config = original(config)
        return str(config._attn_implementation)
    return str(_default_implementation(type(config)))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _default_implementation(config_class: Any) -> str:
    """transformers prefers sdpa and takes eager for models that do not support it."""
    return _found_default(config_class)  # torch.compile would look inside of a cached function


@cached
def _found_default(config_class: Any) -> str:
    code = _modeling_code(config_class)
    models = [model for model in vars(code).values() if hasattr(model, "_supports_sdpa")]
    models = [model for model in models if model.__module__ == code.__name__]
    own = [model for model in models if getattr(model, "config_class", None) is config_class] or models
    return "sdpa" if not own or any(model._supports_sdpa for model in own) else "eager"


def _modeling_code(config_class: Any) -> Any:
    """The module with the models of a configuration, as transformers' folders are laid out; an empty one if there is none."""
    name = config_class.__module__.replace(".configuration_", ".modeling_")
    return sys.modules.get(name) or type(sys)("none")


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def lists_implementations(config_class: Any) -> bool:
    """Whether the code of this configuration's models does something for a list of implementations by name.

    DeepSeek V3.2 and its like add the choice of their indexer to the mask of "eager" and "sdpa"; other implementations are
    expected to make that choice themselves.
    """
    return _compares(config_class, r"\s+in\s+[(\[{]")


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _allows_no_mask_for_sdpa_only(config_class: Any) -> bool:
    """Whether the code of this configuration's models asks if the implementation is sdpa.

    Gemma 4 does because sdpa may have no mask, and takes it for granted that others have one.
    """
    return _compares(config_class, r"\s*==\s*[\"']sdpa[\"']")


@cached
def _compares(config_class: Any, how: str) -> bool:
    """Whether the code of this configuration's models compares the name of the implementation in this way."""
    try:
        source = inspect.getsource(_modeling_code(config_class))
    except (OSError, TypeError):
        return False
    return re.search("_attn_implementation" + how, source) is not None


# --- The mask


@dataclass(frozen=True)
class Sight:
    """Which keys each query sees."""

    causal: bool = False
    before: int = -1
    """How many positions before its own a query sees, at most; -1: all."""
    after: int = -1
    real: Tensor | None = None
    """(batch, keys) bool, False at padding; None: no padding."""
    ids: Tensor | None = None
    """(batch, length) numbers of the sequences in a batch that was packed before the model; None: one sequence a row."""

    @property
    def window(self) -> tuple[int, int] | None:
        return None if self.before < 0 and self.after < 0 else (self.before, self.after)


class LazyMask(Tensor):
    """The mask (batch, 1, queries, keys) of one call as the stock implementation takes it, built when it is first read.

    Whoever has its values may change them, so from then on it is an ordinary mask (`sight` returns None).
    """

    stoker_state: _MaskState

    @staticmethod
    def __new__(cls, state: _MaskState) -> LazyMask:
        made: Any = Tensor._make_wrapper_subclass(cls, state.shape, dtype=state.dtype, device=state.device)
        made.stoker_state = state
        return made  # type: ignore[no-any-return]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LazyMask({tuple(self.shape)})"

    def sight(self) -> Sight | None:
        return self.stoker_state.sight if self.stoker_state.full is None else None

    def full(self) -> Tensor:
        """The ordinary mask."""
        if self.stoker_state.full is None:
            if running_sequences() is not None:
                raise CannotPack("it reads its attention mask itself")
            self.stoker_state.full = self.stoker_state.build()
        return self.stoker_state.full

    def sequences(self, of: Tensor) -> Sequences | None:
        """The sequences of `of` (batch, heads, length, size); None if rows cannot be split into sequences."""
        if self.stoker_state.read is None:
            self.stoker_state.read = _split(self.stoker_state.sight, of)
        return self.stoker_state.read if isinstance(self.stoker_state.read, Sequences) else None

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if args and isinstance(args[0], cls) and _keeps_all(func, args, kwargs):
            return cls(args[0].stoker_state)
        return func(*_ordinary(args), **_ordinary(kwargs or {}))


@dataclass
class _MaskState:
    """What all views of one mask share."""

    sight: Sight
    shape: tuple[int, int, int, int]
    dtype: torch.dtype
    device: torch.device
    build: Callable[[], Tensor]
    full: Tensor | None = None
    read: Sequences | str | None = None
    """Cache: all layers of a call are given the same mask."""


def _ordinary(value: Any) -> Any:
    """`value`, an argument of an operator, with the values of the masks in it."""
    if isinstance(value, (list, tuple)):
        return type(value)(map(_ordinary, value))
    if isinstance(value, dict):
        return {name: _ordinary(one) for name, one in value.items()}
    return value.full() if isinstance(value, LazyMask) else value


def _keeps_all(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operator returns the whole mask as it is: `mask[:, :, :, :length]`, `mask.detach()`."""
    aten = torch.ops.aten
    if func in (aten.alias.default, aten.detach.default):
        return True
    if func is not aten.slice.Tensor or kwargs or len(args) > 5:
        return False
    defaults: tuple[Any, ...] = (None, 0, None, None, 1)
    mask, dim, start, end, step = tuple(args) + defaults[len(args) :]
    return bool(step == 1 and not start and (end is None or end >= mask.shape[dim]))


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
    """None where stock makes no mask, a LazyMask where the kernel can compute what it describes, else the mask of stock.

    Packed rows stand for a batch with padding, for which stock does make a mask.
    """
    from transformers.masking_utils import eager_mask, sdpa_mask

    config = kwargs.get("config")
    if lists_implementations(type(config)):
        _leave_to_stock(config)
    own = _computes_its_own_attention(config)
    eager = own or stock_implementation(config) == "eager"
    lengths = (batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask)

    def build(**options: Any) -> Any:
        return (eager_mask if eager else sdpa_mask)(*lengths, **{"local_size": local_size, **kwargs, **options})

    sight = None
    flat = attention_mask is None or attention_mask.dim() == 2
    if flat and not (own or stock_wanted() or kwargs.get("use_vmap")):
        sight = _read_function(mask_function, attention_mask, (batch_size, q_length, kv_length))
    offset = any(not isinstance(one, int) or one for one in (q_offset, kv_offset))
    moved = offset or q_length != kv_length
    if sight is None or (moved and (sight.causal or sight.window or sight.ids is not None)):
        if running_sequences() is not None:
            raise CannotPack("its attention mask is of an unusual kind")
        return build()  # type: ignore[no-any-return]
    skipped = _is_skipped(sight, q_length, kv_length, local_size, eager, kwargs)
    if skipped and running_sequences() is None and not _allows_no_mask_for_sdpa_only(type(config)):
        return None
    return LazyMask(
        _MaskState(
            sight,
            (batch_size, 1, q_length, kv_length),
            kwargs.get("dtype", torch.float32) if eager else torch.bool,
            torch.device(kwargs.get("device", "cpu")),
            lambda: build(allow_is_causal_skip=False, allow_is_bidirectional_skip=False),
        )
    )


def _is_skipped(
    sight: Sight, queries: int, keys: int, local_size: int | None, eager: bool, options: dict[str, Any]
) -> bool:
    """Whether transformers' sdpa_mask, or eager_mask, would make no mask."""
    if sight.real is not None or sight.ids is not None or (local_size is not None and keys >= local_size):
        return False
    causal_skip = not eager and options.get("allow_is_causal_skip", True) and (queries == keys or queries == 1)
    return bool(causal_skip or options.get("allow_is_bidirectional_skip", False))


def _leave_to_stock(config: Any) -> None:
    """Undoes a user's choice that the model's code would take for something else; the layers of this call read it after us."""
    stock = stock_implementation(config)
    if config._attn_implementation == NAME:
        log.warning(
            "%s: attn_implementation='stoker' is replaced by %r, because the model's code adds to the mask only for the "
            "implementations that it names",
            type(config).__name__,
            stock,
        )
        config._attn_implementation = stock


def _computes_its_own_attention(config: Any) -> bool:
    """Whether the code of this configuration's model never looks up an attention implementation.

    BLOOM, CodeGen, MPNet and others build their mask through transformers, but their layers take an eager one only.
    """
    code = _modeling_code(type(config))
    return hasattr(code, "PreTrainedModel") and not hasattr(code, "ALL_ATTENTION_FUNCTIONS")


# transformers 5.23 and newer: the same conditions on positions that restart with each packed sequence, as our kernel counts them
_RESTARTING = "remap_positions_for_packed_sequence"


def _read_function(function: Any, attention_mask: Tensor | None, shape: tuple[int, int, int]) -> Sight | None:
    """What a mask function of transformers lets queries see; None if it has a condition that is not known here."""
    causal, before, after, ids = False, -1, -1, None
    for name, value in _conditions(function):
        if name == "causal_mask_function":
            causal = True
        elif name == "sliding_window_overlay":  # kv > q - value
            before = _narrower(before, value - 1)
        elif name == "sliding_window_bidirectional_overlay":  # abs(q - kv) <= value
            before, after = _narrower(before, value), _narrower(after, value)
        elif name == "packed_sequence_mask_function":
            ids = value
        elif name != "bidirectional_mask_function":
            return None
    real = None
    if attention_mask is not None:
        if attention_mask.shape != (shape[0], shape[2]):  # transformers takes keys beyond its end for padding
            return None
        if not bool(attention_mask.all()):
            if ids is not None:
                return None
            real = attention_mask.bool()
    longest = max(shape[1:])
    return Sight(causal, -1 if before >= longest else before, -1 if after >= longest else after, real, ids)


def _narrower(one: int, other: int) -> int:
    return other if one < 0 else min(one, other)


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


def _split(sight: Sight, of: Tensor) -> Sequences | str:
    batch, length = of.shape[0], of.shape[2]
    if sight.ids is not None:
        return read_sequence_ids(sight.ids.expand(batch, length), dtype=of.dtype)
    return read_mask(sight.real, batch, length, dtype=of.dtype, device=of.device)


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
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    stoker_sequences: Sequences | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention of q (batch, heads, length, size); returns (batch, length, heads, size), and None for the weights.

    The argument `sliding_window`, if a model passes it, is not read, as in stock: the mask has the window.
    """
    if stoker_sequences is None and running_sequences() is not None:
        raise CannotPack("its layers do not pass keyword arguments on to attention")
    q, k, v = _as_autocast(query, key, value)
    sight = _sight(module, query.shape[2], attention_mask, is_causal, stoker_sequences)
    reason = _why_unsupported(q, k, v, sight, attention_mask, position_bias, kwargs)
    if stoker_sequences is not None and (reason or query.shape[2] != key.shape[2]):
        raise CannotPack(reason or "its queries and keys differ in length")
    if reason is None and sight is not None:
        options: dict[str, Any] = {
            "scale": scaling,
            "dropout_p": dropout,
            "softcap": softcap,
            "sinks": None if s_aux is None else s_aux.float(),
        }
        bias = None if position_bias is None else position_bias[0].float()
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if stoker_sequences is not None:
            ends = stoker_sequences.cu_seqlens
            rows = [x.squeeze(0) for x in (q, k, v)]
            options.update(causal=sight.causal, window=sight.window, bias=bias)
            out: Tensor | None = attention(rows[0], rows[1], rows[2], ends, **options)
        else:
            out = _over_rows(module, q, k, v, _packed_before(sight, query, kwargs), attention_mask, bias, options)
        if out is not None:
            return out.view(*q.shape[:2], *out.shape[1:]), None
    others = {"softcap": softcap, "s_aux": s_aux, "position_bias": position_bias}
    given = {name: one for name, one in others.items() if one is not None}
    return _stock(
        module,
        query,
        key,
        value,
        _ordinary(attention_mask),
        is_causal,
        dropout=dropout,
        scaling=scaling,
        **given,
        **kwargs,
    )


def _as_autocast(*given: Tensor) -> tuple[Tensor, ...]:
    """Inside bf16 autocast, queries and keys are often fp32 and values bf16; autocast makes all of them bf16 for sdpa."""
    if not torch.is_autocast_enabled("cpu") or torch.get_autocast_dtype("cpu") != torch.bfloat16:
        return given
    return tuple(one.to(torch.bfloat16) if one.dtype == torch.float32 else one for one in given)


def sees_all_before(module: nn.Module, length: int, mask: Any, packed: Sequences) -> bool:
    """Whether the tokens of packed rows see all those before them in their sequence, and no others."""
    sight = _sight(module, length, mask, None, packed)
    # `ids` are those of these sequences, which transformers has found in the positions
    return sight is not None and sight.causal and sight.window is None and sight.real is None


def _sight(module: nn.Module, length: int, mask: Any, is_causal: bool | None, packed: Sequences | None) -> Sight | None:
    """Which keys the queries see, if that can be told from the mask, or from what stock does without one."""
    if isinstance(mask, LazyMask):
        return mask.sight()
    if mask is not None:
        # made from no attention mask at all, by a model that makes its own: nothing is hidden
        return Sight() if packed is not None and _hides_nothing(mask) else None
    if stock_implementation(getattr(module, "config", None)) == "eager":
        return Sight()
    # transformers' sdpa takes a layer that says nothing for a causal one; over packed rows, stock may have had a mask instead
    unsaid = True if packed is None else None
    causal = getattr(module, "is_causal", unsaid) if is_causal is None else is_causal
    return None if causal is None else Sight(causal=bool(causal) and length > 1)


def _hides_nothing(mask: Tensor) -> bool:
    if mask.dim() != 4 or mask.shape[2] != 1:
        return False
    return bool(mask.all()) if mask.dtype == torch.bool else not bool(mask.any())


def _why_unsupported(
    query: Tensor, key: Tensor, value: Tensor, sight: Sight | None, mask: Any, bias: Any, kwargs: dict[str, Any]
) -> str | None:
    """Why the kernel cannot compute this call, so that transformers' own implementation does; None if it can."""
    if sight is None and mask is None:
        return "nothing says whether its attention is causal"
    if sight is None:
        return "it makes an attention mask of its own"
    if stock_wanted() or query.device.type != "cpu" or query.dtype not in (torch.float32, torch.bfloat16):
        return f"its attention is {query.dtype} on {query.device}"
    if kwargs.get("output_attentions") or kwargs.get("cache") is not None or not query.numel():
        return "attention weights or a cache are requested"
    if not (query.dtype == key.dtype == value.dtype):
        return "its queries, keys and values differ in type"
    if not (query.shape[-1] == key.shape[-1] == value.shape[-1]):
        return "its keys and values differ in size"
    if query.shape[0] != key.shape[0] or key.shape[:3] != value.shape[:3] or query.shape[1] % key.shape[1]:
        return "its queries and keys differ in number"
    if query.shape[2] != key.shape[2] and (sight.causal or sight.window or bias is not None):
        return "its queries and keys differ in length"
    if bias is not None and not (bias.shape[0] == 1 and bias.shape[2] == bias.shape[3] == query.shape[2]):
        return "its position bias differs between examples"
    return None


def _packed_before(sight: Sight, query: Tensor, kwargs: dict[str, Any]) -> Sight:
    """`sight`, within the sequences of a batch that a collator has packed, if it passes only their cumulative lengths."""
    ends: Any = kwargs.get("cu_seq_lens_q")
    if not isinstance(ends, Tensor) or query.shape[0] != 1 or int(ends[-1]) != query.shape[2]:
        return sight
    if sight.ids is not None or sight.real is not None:
        return sight
    return Sight(sight.causal, sight.before, sight.after, None, sequence_ids(ends))


def _over_rows(
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sight: Sight,
    mask: Tensor | None,
    bias: Tensor | None,
    options: dict[str, Any],
) -> Tensor | None:
    """Attention over a batch (batch, length, heads, size); returns (batch * length, heads, size), None if stock has to run.

    Rows at padding get the values that stock gives them: models may pool them or divide by their norm.
    """
    read = mask.sequences if isinstance(mask, LazyMask) and mask.sight() is sight else None
    of = k.transpose(1, 2)
    keys = read(of) if read is not None else _split(sight, of)
    if not isinstance(keys, Sequences):
        return None
    self_attention = q.shape[1] == k.shape[1]
    flat_q, k, v = q.flatten(0, 1), keys.pack(k).squeeze(0), keys.pack(v).squeeze(0)
    if keys.mask is None and self_attention:
        return attention(flat_q, k, v, keys.cu_seqlens, causal=sight.causal, window=sight.window, bias=bias, **options)
    if keys.cu_seqlens.numel() != keys.batch + 1 or sight.window is not None:
        return None  # a row without keys; a window that padding has moved out of
    if not sight.causal:
        if bias is not None and keys.left is not None:
            return None  # the bias of a distance is read from the first key on
        ends = torch.arange(0, flat_q.shape[0] + 1, q.shape[1], dtype=torch.int32)
        return attention(flat_q, k, v, ends, bias=bias, cu_seqlens_k=keys.cu_seqlens, **options)
    assert keys.mask is not None
    assert keys.index is not None
    if keys.left is not None and stock_implementation(getattr(module, "config", None)) == "eager":
        return None  # queries before the first token see no key, of which eager attention makes a mean over all of them
    out = attention(flat_q.index_select(0, keys.index), k, v, keys.cu_seqlens, causal=True, bias=bias, **options)
    rows = out.new_zeros(flat_q.shape).index_copy(0, keys.index, out)
    after = ~keys.mask & (keys.mask.cumsum(1) > 0)  # these see all keys of their row
    return rows if not bool(after.any()) else _fill(rows, after, flat_q, k, v, keys, bias, options)


def _fill(
    rows: Tensor,
    at: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Sequences,
    bias: Tensor | None,
    options: dict[str, Any],
) -> Tensor | None:
    """`rows` with the attention of the queries at padding over all keys of their row."""
    if bias is not None:
        return None
    index = at.reshape(-1).nonzero().squeeze(1)
    ends = torch.nn.functional.pad(at.sum(1).cumsum(0), (1, 0)).int()
    out = attention(q.index_select(0, index), k, v, ends, cu_seqlens_k=keys.cu_seqlens, **options)
    return rows.index_copy(0, index, out)


def _stock(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool | None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """transformers' sdpa, or the model's own eager attention where that is its stock implementation or sdpa lacks an option."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    eager: Any = getattr(sys.modules.get(type(module).__module__), "eager_attention_forward", None)
    lacking = options.get("softcap") is not None or options.get("s_aux") is not None
    by_eager = lacking or stock_implementation(getattr(module, "config", None)) == "eager"
    if not by_eager or (eager is None and not lacking):
        return sdpa_attention_forward(module, query, key, value, mask, is_causal=is_causal, **options)  # type: ignore[no-any-return]
    if eager is None:
        raise NotImplementedError(
            f"attn_implementation='stoker': {type(module).__name__} needs a softcap or attention sinks in a call that "
            "the kernel cannot compute, and the model has no eager attention; use another attn_implementation"
        )
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=query.dtype).masked_fill(~mask, torch.finfo(query.dtype).min)
    if is_causal is not None:
        options["is_causal"] = is_causal
    return eager(module, query, key, value, mask, **options)  # type: ignore[no-any-return]
