"""Attention and feed forward of models outside of the table, where their code is that of a family in the table.

Most decoders of transformers differ from Llama around these two modules (multipliers, other norms, experts), not in them: their
`forward` is compiled from the same lines. Such a module runs as the layers of the table do, by one native call per direction
(layer_program.py), instead of a dozen operators. A module with any other code is left alone.
"""

from __future__ import annotations

import math
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from stoker.kernels.tracing import stock_wanted
from stoker.model import layer_program, leaf_modules
from stoker.model.attention_interface import sees_all_before
from stoker.model.class_swap import Optimized, cached, stock_class
from stoker.model.families import Family
from stoker.model.layer_parts import LayerParts, run_layer
from stoker.model.module_watch import Watch
from stoker.model.sequences import Sequences, running_sequences

__all__ = ["KnownAttention", "KnownPart", "known_part"]

ATTENTION = Family(
    name="attention like Llama's", folder="llama", base="", layer="", piece="attention", causal=True, query="q_proj",
    key="k_proj", value="v_proj", grouped="config", scale="scaling", head_size="head_dim",
    attention_dropout="attention_dropout", rotary="position_embeddings", out="o_proj",
)  # fmt: skip
FEED_FORWARD = Family(
    name="feed forward like Llama's", folder="llama", base="", layer="", piece="feed_forward", gate="gate_proj",
    up="up_proj", activation="act_fn", down="down_proj",
)  # fmt: skip

_ARGUMENTS = ("self", "hidden_states", "position_embeddings", "attention_mask", "past_key_values", "kwargs")


def known_part(module: nn.Module) -> tuple[type[KnownPart], Family] | None:
    """The override of an attention or feed-forward module, and its row; None if its code is not known."""
    cls = stock_class(type(module))
    if _is_code_of(cls, "LlamaMLP"):
        inner: Any = module
        return (
            (KnownFeedForward, FEED_FORWARD) if _width(inner.gate_proj) == _width(inner.down_proj, out=True) else None
        )
    if _is_code_of(cls, "LlamaAttention") and _heads_fit(module):
        return KnownAttention, ATTENTION
    return None


def _width(linear: Any, out: bool = False) -> int | None:
    return getattr(linear, "out_features" if out else "in_features", None)


def _heads_fit(module: Any) -> bool:
    """Whether the modules have the sizes that the configuration says, which is where the heads are counted."""
    try:
        size, config = module.head_dim, module.config
        q, k = size * config.num_attention_heads, size * config.num_key_value_heads
        linears = (module.q_proj, module.k_proj, module.v_proj, module.o_proj)
    except Exception:  # a configuration may have no such number, or refuse to tell it because layers differ
        return False
    widths = [_width(linear, out=True) for linear in linears]
    return widths[:3] == [q, k, k] and widths[3] is not None and widths[3] == _width(module.q_proj)


# --- Comparing code


@cached
def _is_code_of(cls: type[nn.Module], reference: str) -> bool:
    """Whether the forward of `cls` is compiled from the same lines as that of a class of transformers' Llama."""
    if not cls.__name__.endswith(reference.removeprefix("Llama")):
        return False
    try:
        from transformers.models.llama import modeling_llama as llama
    except ImportError:
        return False
    known: Any = getattr(llama, reference, None)
    own, stock = getattr(cls, "forward", None), getattr(known, "forward", None)
    if reference == "LlamaAttention" and isinstance(stock, FunctionType):
        code = stock.__code__
        if code.co_varnames[: len(_ARGUMENTS)] != _ARGUMENTS or code.co_argcount != len(_ARGUMENTS) - 1:
            return False  # transformers has changed what the override takes
    return _same_function(own, stock)


_NOT_CALLED = ("eager_attention_forward",)  # the default of the lookup that Stoker's own attention is found by


def _same_function(one: Any, other: Any) -> bool:
    """Whether two functions do the same: the same instructions with the same constants, on globals that do the same."""
    if one is other:
        return True
    if not (isinstance(one, FunctionType) and isinstance(other, FunctionType)):
        return False
    a, b = one.__code__, other.__code__
    if hasattr(one, "__wrapped__") or hasattr(other, "__wrapped__") or a.co_freevars or b.co_freevars:
        return False
    if (a.co_code, a.co_names, a.co_varnames, _constants(one)) != (
        b.co_code,
        b.co_names,
        b.co_varnames,
        _constants(other),
    ):
        return False
    if (one.__defaults__, one.__kwdefaults__) != (other.__defaults__, other.__kwdefaults__):
        return False
    names = [name for name in a.co_names if name not in _NOT_CALLED]
    pairs = [(one.__globals__.get(name), other.__globals__.get(name)) for name in names]
    return all(first is second or _same_function(first, second) for first, second in pairs)


def _constants(function: FunctionType) -> tuple[Any, ...]:
    return tuple(one for one in function.__code__.co_consts if one != function.__doc__)


# --- Running


class KnownPart(Optimized):
    stoker_needs_sequences = False
    """It runs only inside of a padding-free base model."""

    def stoker_called(self) -> list[nn.Module]:
        """The modules inside that are called instead of read."""
        return LayerParts(self, self.stoker_row, True).called()

    def stoker_adapted(self) -> list[nn.Module]:
        """The modules inside whose weights are read together with those of their adapters."""
        return LayerParts(self, self.stoker_row, True).adapted()

    def stoker_run(self, x: Tensor, sequences: Sequences, extra: dict[str, Any]) -> Tensor | None:
        """The output for packed rows (1, tokens, width); None if stock's operators are the better way."""
        y = layer_program.run(self, x, sequences, extra)
        # Without a program every operator has a node of its own, which costs more than it saves for few numbers.
        if y is None and x.numel() * x.shape[2] >= leaf_modules.SMALL_PRODUCT:
            y = run_layer(LayerParts(self, self.stoker_row, True), x.squeeze(0), sequences, extra).unsqueeze(0)
        return y


class KnownAttention(KnownPart):
    stoker_part = "fused attention"
    stoker_needs_sequences = True

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Any = None,
        attention_mask: Any = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Any:
        sequences: Sequences | None = kwargs.get("stoker_sequences")
        if (
            sequences is not None
            and past_key_values is None
            and position_embeddings is not None
            and not kwargs.get("output_attentions")
            and tuple(hidden_states.shape[:2]) == (1, sequences.tokens)
            and sees_all_before(self, sequences.tokens, attention_mask, sequences)
        ):
            x = hidden_states.to(sequences.dtype)
            y = self.stoker_run(x, sequences, {"position_embeddings": position_embeddings})
            if y is not None:
                return y, None
        stock: Any = super()
        return stock.forward(hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)


_TYPES = (torch.float32, torch.bfloat16)
_WATCHES: WeakKeyDictionary[nn.Module, Watch] = WeakKeyDictionary()
"""Cache: the watch over each feed-forward module that was called outside of a padding-free base model."""


class KnownFeedForward(KnownPart):
    stoker_part = "fused feed forward"

    def forward(self, x: Tensor) -> Any:
        stock: Any = super()
        # Experts, which are given another number of tokens in each call, get two dimensions.
        if type(x) is not Tensor or x.dim() != 3 or x.device.type != "cpu" or x.dtype not in _TYPES or stock_wanted():
            return stock.forward(x)
        dtype = x.dtype
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
        gate: Any = getattr(self.gate_proj, "weight", None)
        if dtype not in _TYPES or (not torch.is_autocast_enabled("cpu") and dtype != getattr(gate, "dtype", None)):
            return stock.forward(x)
        rows = x.to(dtype).reshape(1, math.prod(x.shape[:2]), x.shape[2])
        y = self.stoker_run(rows, running_sequences() or self._outside(dtype), {})
        return stock.forward(x) if y is None else y.view(x.shape)

    def _outside(self, dtype: torch.dtype) -> Sequences:
        """What stands for a batch, with a watch over this module, which computes each token by itself."""
        watch = _WATCHES.get(self)
        if watch is None or not watch.unchanged():
            watch = _WATCHES[self] = Watch(self)
        none = torch.zeros(0, dtype=torch.int64)
        outside = Sequences(batch=1, length=1, cu_seqlens=none, longest=1, positions=none, dtype=dtype)
        outside.shared[Watch] = watch
        return outside
