"""The overrides of a transformer layer and of the embeddings: one for every family of the table.

What a layer computes is in layer_parts.py; layer_program.py runs it by one native call per direction where it can.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from stoker.kernels.embedding import embedding_layer_norm_dropout
from stoker.kernels.tracing import stock_wanted
from stoker.model import layer_program
from stoker.model.class_swap import Optimized, child, named, plain
from stoker.model.families import Family, transformers_major
from stoker.model.layer_parts import LayerParts, run_layer, weighted
from stoker.model.leaf_modules import only_gathers
from stoker.model.module_watch import Watch
from stoker.model.sequences import Sequences, ambient, attach, running_sequences

__all__ = ["FusedEmbeddings", "FusedLayer", "RelativeBias", "RelativeDistances"]


class FusedLayer(Optimized):
    """Override of one transformer layer. It runs as stock does unless a padding-free base model calls it."""

    stoker_part = "fused layer"

    def stoker_called(self) -> list[nn.Module]:
        """The modules inside that are called instead of read."""
        return LayerParts(self, self.stoker_row, self.stoker_settings.fuse).called()

    def stoker_adapted(self) -> list[nn.Module]:
        """The modules inside whose weights are read together with those of their adapters."""
        return LayerParts(self, self.stoker_row, self.stoker_settings.fuse).adapted()

    def stoker_after_attention(self) -> list[nn.Module]:
        """The linear layers that follow attention."""
        row: Family = self.stoker_row
        return [child(self, path) for path in (row.out, *row.ups(), row.down)]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if (sequences := kwargs.get("stoker_sequences")) is not None:
            return self._called(sequences)(*args, **kwargs)
        hidden: Any = args[0] if args else next(iter(kwargs.values()), None)
        if (sequences := ambient(hidden)) is None:
            return super().__call__(*args, **kwargs)
        # as an argument, so that the layer's own activation checkpointing keeps it
        output = self._called(sequences)(*args, stoker_sequences=sequences, **kwargs)
        attach(hidden, sequences)
        attach(output[0] if isinstance(output, tuple) else output, sequences)
        return output

    def _called(self, sequences: Sequences) -> Callable[..., Any]:
        return self.forward if layer_program.is_called_directly(self, sequences) else super().__call__

    def forward(self, *args: Any, stoker_sequences: Sequences | None = None, **kwargs: Any) -> Any:
        if stoker_sequences is None:
            return super().forward(*args, **kwargs)
        row: Family = self.stoker_row
        extra = named(self, args, kwargs)
        hidden = args[0] if args else next(iter(extra.values()))
        hidden = hidden.to(stoker_sequences.dtype)
        y = layer_program.run(self, hidden, stoker_sequences, extra)
        if y is None:
            parts = LayerParts(self, row, self.stoker_settings.fuse)
            x_TH = hidden.squeeze(0)  # not hidden[0], whose gradient is a copy
            y = run_layer(parts, x_TH, stoker_sequences, extra).unsqueeze(0)
        return (y, *[None] * (row.tuple_size - 1)) if row.tuple_until >= transformers_major() else y


class FusedEmbeddings(Optimized):
    """Override of the embeddings: word + position + type, norm and dropout in one pass."""

    stoker_part = "fused embeddings"

    def stoker_called(self) -> list[nn.Module]:
        """The modules inside that are called instead of read: none, or all if one of them cannot be read."""
        return [] if self._readable() else list(self.children())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        call = named(self, args, kwargs)
        if stock_wanted() or not self._fusable(call):
            return super().forward(*args, **kwargs)
        row: Family = self.stoker_row
        ids = call["input_ids"]
        word, position, token_type = self._tables()
        norm, drop = child(self, row.embedding_norm), child(self, row.embedding_dropout)
        return embedding_layer_norm_dropout(
            ids,
            None if position is None else call["position_ids"].expand_as(ids),
            None if token_type is None else call.get("token_type_ids", torch.zeros_like(ids)),
            word.weight,
            None if position is None else position.weight,
            None if token_type is None else token_type.weight,
            norm.weight,
            norm.bias,
            eps=norm.eps,
            p=drop.p,
            training=drop.training,
            padding_idx=word.padding_idx,
        )

    def _tables(self) -> list[Any]:
        """The tables of words, positions and token types; None where there is none."""
        row: Family = self.stoker_row
        return [None if path is None else child(self, path) for path in (row.word, row.position, row.token_type)]

    def _fusable(self, call: dict[str, Any]) -> bool:
        _, position, _ = self._tables()
        if "input_ids" not in call or "inputs_embeds" in call or call.get("past_key_values_length"):
            return False
        if "mask" in call and not bool(call["mask"].all()):  # DeBERTa's embeddings are zero at padding
            return False
        if (position is not None and "position_ids" not in call) or not self._known_readable():
            return False
        # The kernel handles the padding index of the word table only. RoBERTa's position table has one too, which matters
        # if a padding token is not masked.
        padding = None if position is None else position.padding_idx
        return padding is None or not bool((call["position_ids"] == padding).any())

    def _known_readable(self) -> bool:
        """As `_readable`, found out once as long as the watch over the model holds."""
        sequences = running_sequences()
        facts = sequences.shared[Watch].facts if sequences is not None and Watch in sequences.shared else {}
        if id(self) not in facts:
            facts[id(self)] = self._readable()
        return bool(facts[id(self)])

    def _readable(self) -> bool:
        row: Family = self.stoker_row
        if row.embedding_projection and child(self, row.embedding_projection) is not None:
            return False
        tables = [table for table in self._tables() if table is not None]
        if not all(plain(table, nn.Embedding) and _readable_table(table) for table in tables):
            return False
        norm, drop = child(self, row.embedding_norm), child(self, row.embedding_dropout)
        one_type = len({table.weight.dtype for table in tables}) == 1
        return one_type and weighted(norm) and plain(drop, nn.Dropout)


def _readable_table(table: Any) -> bool:
    weight = table.weight
    return only_gathers(table) and weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.bfloat16)


_DISTANCES: WeakKeyDictionary[nn.Module, dict[Any, Tensor | None]] = WeakKeyDictionary()
"""Cache: the positions of all distances, for the lengths of the last batches."""
_KEPT = 64


class RelativeDistances(Optimized):
    """Override of an encoder that computes the relative position of every pair of tokens: one of each distance is enough."""

    stoker_part = "relative positions"

    def stoker_called(self) -> list[nn.Module]:
        """The modules inside that are called: not the table of positions, whose weight stock reads."""
        return [module for module in self.children() if not isinstance(module, nn.Embedding)]

    def get_rel_pos(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        stock: Any = super()
        if (sequences := ambient(hidden_states)) is None:
            return stock.get_rel_pos(hidden_states, *args, **kwargs)
        # what they depend on: the length, and the numbers of this encoder
        key = (sequences.longest, *((name, n) for name, n in vars(self).items() if isinstance(n, int)))
        known = _DISTANCES.setdefault(self, {})
        if key not in known:
            if len(known) >= _KEPT:
                known.clear()
            with torch.inference_mode(False):  # a training step may use them later
                # all tokens of the longest sequence as queries, its first one as the only key
                tokens = torch.empty(1, sequences.longest, 0)
                positions = stock.get_rel_pos(tokens[:, :1], tokens)
                ahead = None if positions is None else positions.reshape(-1)
                return known.setdefault(key, None if ahead is None else torch.cat([-ahead[1:].flip(0), ahead]))
        return known.get(key)


class RelativeBias(Optimized):
    """Override of an encoder that makes a position bias: the one of the longest sequence serves all of them."""

    stoker_part = "relative position bias"

    def compute_position_bias(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        stock: Any = super()
        if (sequences := ambient(x)) is None:
            return stock.compute_position_bias(x, *args, **kwargs)
        return stock.compute_position_bias(x.new_empty(1, sequences.longest, 0), *args, **kwargs)
