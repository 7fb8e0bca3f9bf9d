"""The fused transformer layer: one forward for every family of the table.

It reads the weights of the stock modules, and of LoRA adapters around them, and calls the native kernels over packed rows
(tokens, width). A module that is wrapped otherwise, hooked or parametrized is called instead, and its neighbours stay fused.
Shape suffixes: T tokens, H hidden size, F feed-forward size.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from stoker.kernels.activation import bias_activation, gated_activation
from stoker.kernels.attention import Relative, attention, attention_packed
from stoker.kernels.dropout import dropout
from stoker.kernels.embedding import embedding_layer_norm_dropout
from stoker.kernels.lora import lora_linear_packed
from stoker.kernels.norm import dropout_add_layer_norm, dropout_add_rms_norm, layer_norm, rms_norm
from stoker.kernels.tracing import stock_wanted
from stoker.model.adapters import LinearParts, read_linear
from stoker.model.class_swap import Optimized, child, named, ordinary, plain, stock_class, unhooked
from stoker.model.families import Family, transformers_major
from stoker.model.leaf_modules import activation_kind, dropout_probability, only_gathers, rms_eps
from stoker.model.sequences import Sequences, ambient, attach

__all__ = ["FusedEmbeddings", "FusedLayer", "RelativeBias", "RelativeDistances"]


class FusedLayer(Optimized):
    """Override of one transformer layer. It runs as stock does unless a padding-free base model calls it."""

    stoker_part = "fused layer"

    def stoker_called(self) -> list[nn.Module]:
        """The modules inside that are called instead of read."""
        return _Parts(self, self.stoker_row, self.stoker_settings.fuse).called()

    def stoker_adapted(self) -> list[nn.Module]:
        """The modules inside whose weights are read together with those of their adapters."""
        return _Parts(self, self.stoker_row, self.stoker_settings.fuse).adapted()

    def stoker_after_attention(self) -> list[nn.Module]:
        """The linear layers that follow attention."""
        row: Family = self.stoker_row
        return [child(self, path) for path in (row.out, *row.ups(), row.down)]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if "stoker_sequences" in kwargs:
            return super().__call__(*args, **kwargs)
        hidden: Any = args[0] if args else next(iter(kwargs.values()), None)
        if (sequences := ambient(hidden)) is None:
            return super().__call__(*args, **kwargs)
        # as an argument, so that the layer's own activation checkpointing keeps it
        output = super().__call__(*args, stoker_sequences=sequences, **kwargs)
        attach(hidden, sequences)
        attach(output[0] if isinstance(output, tuple) else output, sequences)
        return output

    def forward(self, *args: Any, stoker_sequences: Sequences | None = None, **kwargs: Any) -> Any:
        if stoker_sequences is None:
            return super().forward(*args, **kwargs)
        row: Family = self.stoker_row
        extra = named(self, args, kwargs)
        hidden = args[0] if args else next(iter(extra.values()))
        x = hidden.squeeze(0).to(stoker_sequences.dtype)  # not hidden[0], whose gradient is a copy
        run = _pre_norm if row.pre_norm else _post_norm
        y = run(_Parts(self, row, self.stoker_settings.fuse), x, stoker_sequences, extra).unsqueeze(0)
        return (y, *[None] * (row.tuple_size - 1)) if row.tuple_until >= transformers_major() else y


def _post_norm(m: _Parts, x_TH: Tensor, sequences: Sequences, extra: dict[str, Any]) -> Tensor:
    row = m.row
    context_TH = _attend(m, x_TH, sequences, extra)
    x_TH, context_TH = m.still_needed(sequences, x_TH, context_TH)
    y_TH, bias = m.project(row.out, context_TH)
    x_TH = m.add_norm(y_TH, bias, x_TH, row.out_dropout, row.attention_norm)
    y_TH, bias = m.project(row.down, _inner(m, x_TH))
    return m.add_norm(y_TH, bias, x_TH, row.down_dropout, row.down_norm)  # type: ignore[no-any-return]


def _pre_norm(m: _Parts, x_TH: Tensor, sequences: Sequences, extra: dict[str, Any]) -> Tensor:
    row = m.row
    context_TH = _attend(m, m.norm(row.attention_norm, x_TH), sequences, extra)
    x_TH, context_TH = m.still_needed(sequences, x_TH, context_TH)
    y_TH, bias = m.project(row.out, context_TH, row.attention_output_norm)
    if row.parallel and child(m.layer, row.parallel):
        normed_TH = m.norm(row.down_norm, x_TH)
        x_TH = m.add(y_TH, bias, x_TH, row.out_dropout)
    else:
        normed_TH, x_TH = m.add_norm(y_TH, bias, x_TH, row.out_dropout, row.down_norm, sum=True)
    y_TH, bias = m.project(row.down, _inner(m, normed_TH), row.down_output_norm)
    return m.add(y_TH, bias, x_TH, row.down_dropout)


def _attend(m: _Parts, x_TH: Tensor, sequences: Sequences, extra: dict[str, Any]) -> Tensor:
    row, layer = m.row, m.layer
    qkv = m.project_together(row.projections(), x_TH)
    size = child(layer, row.head_size)
    heads, kv_heads = _head_counts(m, qkv.shape[1] // size)
    window = row.window(layer) if row.window else None
    rotary = extra.get(row.rotary) if row.rotary else None
    bias = extra.get(row.relative_bias) if row.relative_bias else None
    options: dict[str, Any] = {
        "causal": row.causal,
        "window": None if window is None else (window, window),
        # stock passes both halves of the angles, which are equal; the kernel needs fp32, whatever the parameters are
        "rotary": None if rotary is None else tuple(part[0, :, : part.shape[-1] // 2].float() for part in rotary),
        "bias": None if bias is None else bias.squeeze(0).float(),
        "scale": child(layer, row.scale) if isinstance(row.scale, str) else row.scale and row.scale(layer),
        "softcap": child(layer, row.softcap) if row.softcap else None,
        "dropout_p": _attention_dropout(m),
        "relative": _relative(m, sequences, extra, size),
    }
    if row.query_norm is None or row.key_norm is None:
        layout: Literal["heads", "blocks"] = "heads" if row.packed_by_head else "blocks"
        return attention_packed(qkv, sequences.cu_seqlens, heads, kv_heads, layout=layout, **options)
    parts = torch.split(qkv, [heads * size, kv_heads * size, kv_heads * size], dim=1)
    q, k = (m.norm_heads(path, part, size) for path, part in zip((row.query_norm, row.key_norm), parts, strict=False))
    v = parts[2].view(-1, kv_heads, size)
    return attention(q, k, v, sequences.cu_seqlens, **options).flatten(1)


def _relative(m: _Parts, sequences: Sequences, extra: dict[str, Any], size: int) -> Relative | None:
    """The projected tables of relative positions, as far as the distances in this batch need them."""
    parts, paths = m.row.relative, m.position_paths()
    if parts is None or not paths or parts.table not in extra or parts.distances not in extra:
        return None
    span = child(m.layer, parts.span)
    rows = (extra[parts.distances] + span).clamp(0, 2 * span - 1)
    first, last = (int(end) for end in rows.aminmax())
    table = m.dropout(parts.dropout, extra[parts.table][first : last + 1].to(sequences.dtype))
    projected = m.project_together(tuple(paths.values()), table).view(last - first + 1, len(paths), -1, size).unbind(1)
    found = dict(zip(paths, projected, strict=True))
    return found.get("p2c"), found.get("c2p"), rows - first


def _head_counts(m: _Parts, all_heads: int) -> tuple[int, int]:
    """How many heads q has, and how many k and v have, out of their sum."""
    if m.row.grouped is None:
        return all_heads // 3, all_heads // 3
    config = child(m.layer, m.row.grouped)
    return config.num_attention_heads, config.num_key_value_heads


def _attention_dropout(m: _Parts) -> float:
    row = m.row
    if row.attention_dropout_called:
        return m.probability(row.attention_dropout) or 0.0  # PaddingFreeModel has checked that it can be read
    p = child(m.layer, row.attention_dropout)
    return getattr(p, "p", p) if m.layer.training else 0.0


def _inner(m: _Parts, x_TH: Tensor) -> Tensor:
    """dropout(activation(up(x))), or with a gate dropout(activation(gate(x)) * up(x))"""
    row = m.row
    y_TF = m.project_together(row.ups(), x_TH) if row.gate else None
    y_TF, bias = m.project(row.up, x_TH) if y_TF is None else (y_TF, None)
    module = child(m.layer, row.activation)
    kind = activation_kind(module) if m.fuse else None
    gated = row.gated or row.gate is not None
    if kind is not None:
        y_TF = gated_activation(y_TF, bias, kind) if gated else bias_activation(y_TF, bias, kind)
    else:
        y_TF = y_TF if bias is None else y_TF + bias.to(y_TF.dtype)
        first, *second = y_TF.chunk(2, dim=-1) if gated else (y_TF,)
        y_TF = module(first) * second[0] if gated else module(first)
    return m.dropout(row.inner_dropout, y_TF)


class _Parts:
    """The modules of one layer, each used through its weights where that is equivalent to calling it."""

    def __init__(self, layer: nn.Module, row: Family, fuse: bool) -> None:
        self.layer, self.row, self.fuse = layer, row, fuse

    def still_needed(self, sequences: Sequences, *rows: Tensor) -> tuple[Tensor, ...]:
        """The rows of the tokens whose output somebody reads; the rest of a layer computes each token by itself."""
        return tuple(map(sequences.firsts, rows)) if sequences.first_from is self.layer else rows

    def project(self, path: str, x: Tensor, norm: str | None = None) -> tuple[Tensor, Tensor | None]:
        """norm(x W^T), and the bias that the next kernel still has to add; there is none after a norm."""
        module = child(self.layer, path)
        if self.fuse and (parts := read_linear(module)) is not None:
            y, bias = lora_linear_packed(x, [parts.weight], None, [parts.adapters]), parts.bias
        else:
            y, bias = _call(module, x), None
        if norm is None:
            return y, bias
        return self.norm(norm, y if bias is None else y + bias.to(y.dtype)), None

    def project_together(self, paths: tuple[str, ...], x: Tensor) -> Tensor:
        """The projections of `x` by several linear layers side by side, as one product."""
        modules = [child(self.layer, path) for path in paths]
        if self.fuse and (read := _read_together(modules)) is not None:
            biases = [parts.bias for parts in read if parts.bias is not None]
            return lora_linear_packed(x, [parts.weight for parts in read], biases, [parts.adapters for parts in read])
        outputs = [_call(module, x) for module in modules]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)

    def add_norm(
        self,
        y: Tensor,
        bias: Tensor | None,
        residual: Tensor,
        dropout_path: str | None,
        norm_path: str | None,
        sum: bool = False,
    ) -> Any:
        """norm(s), or with `sum` norm(s) and s, where s = residual + dropout(y + bias)"""
        weights, p = self._norm_weights(norm_path), self.probability(dropout_path)
        if self.fuse and p is not None and weights is not None:
            common: dict[str, Any] = {"x_bias": bias, "p": p, "training": p > 0.0, "return_sum": sum}
            weight, norm_bias, eps = weights
            if self.row.norm == "layer":
                return dropout_add_layer_norm(y, residual, weight, norm_bias, eps=eps, **common)
            return dropout_add_rms_norm(y, residual, weight, eps=eps, **common)
        total = self.add(y, bias, residual, dropout_path)
        normed = total if norm_path is None else _call(child(self.layer, norm_path), total)
        return (normed, total) if sum else normed

    def add(self, y: Tensor, bias: Tensor | None, residual: Tensor, dropout_path: str | None) -> Tensor:
        y = y if bias is None else y + bias.to(y.dtype)
        return residual + self.dropout(dropout_path, y)

    def norm(self, path: str | None, x: Tensor) -> Tensor:
        if path is None:
            return x
        if not self.fuse or (weights := self._norm_weights(path)) is None:
            return _call(child(self.layer, path), x)
        weight, bias, eps = weights
        return layer_norm(x, weight, bias, eps) if self.row.norm == "layer" else rms_norm(x, weight, eps)

    def norm_heads(self, path: str, x: Tensor, size: int) -> Tensor:
        """The norm of each head of `x` (tokens, heads * size), or of all heads together, as (tokens, heads, size)."""
        if child(self.layer, path).weight.shape[0] == size:
            return self.norm(path, x.reshape(x.shape[0], -1, size))
        return self.norm(path, x).view(x.shape[0], -1, size)

    def position_paths(self) -> dict[str, str]:
        """The linear layers that project relative positions, by the term of the scores they are for."""
        parts = self.row.relative
        if parts is None or not child(self.layer, parts.active):
            return {}
        shared, terms = child(self.layer, parts.shared), child(self.layer, parts.terms)
        paths = {"p2c": self.row.query if shared else parts.query, "c2p": self.row.key if shared else parts.key}
        return {term: path for term, path in paths.items() if term in terms}

    def dropout(self, path: str | None, x: Tensor) -> Tensor:
        p = self.probability(path)
        if p == 0.0:
            return x
        return dropout(x, p) if self.fuse and p is not None else _call(child(self.layer, path or ""), x)

    def probability(self, path: str | None) -> float | None:
        """The dropout probability in force, None if the module has to be called."""
        return dropout_probability(None if path is None else child(self.layer, path))

    def called(self) -> list[nn.Module]:
        """The modules that are called, because reading their weights would not be equivalent."""
        row = self.row
        qkv = [child(self.layer, path) for path in row.projections()]
        called = qkv if _read_together(qkv) is None else []
        positions = [child(self.layer, path) for path in self.position_paths().values()]
        if _read_together(positions) is None:
            called += [module for module in positions if module not in called]
        linears = [child(self.layer, path) for path in (row.out, *row.ups(), row.down)]
        called += [module for module in linears if read_linear(module) is None]
        # a norm is read together with the dropout before it
        with_dropout = (
            {row.down_norm: row.out_dropout}
            if row.pre_norm
            else {row.attention_norm: row.out_dropout, row.down_norm: row.down_dropout}
        )
        for path in row.norms():
            readable = self._norm_weights(path) and self.probability(with_dropout.get(path)) is not None
            called += [] if readable else [child(self.layer, path)]
        of_positions = row.relative.dropout if row.relative and positions else None
        dropouts = (row.out_dropout, row.inner_dropout, row.down_dropout, of_positions)
        called += [child(self.layer, path) for path in dropouts if path and self.probability(path) is None]
        activation = child(self.layer, row.activation)
        called += [activation] if activation_kind(activation) is None and isinstance(activation, nn.Module) else []
        return called

    def adapted(self) -> list[nn.Module]:
        """The linear layers that are read together with their adapters."""
        if not self.fuse:
            return []
        called = self.called()
        positions = (path for path in self.position_paths().values() if path not in self.row.projections())
        paths = (*self.row.projections(), self.row.out, *self.row.ups(), self.row.down, *positions)
        linears = [module for path in paths if (module := child(self.layer, path)) not in called]
        return [module for module in linears if (parts := read_linear(module)) is not None and parts.adapters]

    def _norm_weights(self, path: str | None) -> tuple[Tensor, Tensor | None, float] | None:
        """Weight, bias and epsilon of a norm; None if it has to be called."""
        if path is None:
            return None
        norm = child(self.layer, path)
        if self.row.norm == "layer":
            return (norm.weight, norm.bias, norm.eps) if _weighted(norm) else None
        # the family's own class, whose formula the table states
        if stock_class(type(norm)).__module__ != stock_class(type(self.layer)).__module__:
            return None
        eps = rms_eps(norm)
        if eps is None or not (unhooked(norm) and ordinary(norm)):
            return None
        return (norm.weight + 1.0 if self.row.norm == "rms_plus_one" else norm.weight), None, eps


def _read_together(modules: list[Any]) -> list[LinearParts] | None:
    """The weights of these linear layers, None if they cannot be read side by side: all of them, with a bias each or none."""
    read = [parts for module in modules if (parts := read_linear(module)) is not None]
    return read if len(read) == len(modules) and len({parts.bias is None for parts in read}) == 1 else None


def _weighted(norm: Any) -> bool:
    """Whether the weights of this LayerNorm can be read: it has some, for the last dimension only."""
    return plain(norm, nn.LayerNorm) and norm.weight is not None and norm.weight.dim() == 1


def _call(module: nn.Module, x: Tensor) -> Tensor:
    """Calls a foreign module in the type of its parameters, which may differ from that of the activations."""
    if isinstance(module, Optimized):
        return module(x)  # type: ignore[no-any-return]
    # a layer of bitsandbytes has integer codes among its parameters
    parameter = next((one for one in module.parameters() if one.is_floating_point()), x)
    return module(x.to(parameter.dtype)).to(x.dtype)  # type: ignore[no-any-return]


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
        if (position is not None and "position_ids" not in call) or not self._readable():
            return False
        # The kernel handles the padding index of the word table only. RoBERTa's position table has one too, which matters
        # if a padding token is not masked.
        padding = None if position is None else position.padding_idx
        return padding is None or not bool((call["position_ids"] == padding).any())

    def _readable(self) -> bool:
        row: Family = self.stoker_row
        if row.embedding_projection and child(self, row.embedding_projection) is not None:
            return False
        tables = [table for table in self._tables() if table is not None]
        if not all(plain(table, nn.Embedding) and _readable_table(table) for table in tables):
            return False
        norm, drop = child(self, row.embedding_norm), child(self, row.embedding_dropout)
        one_type = len({table.weight.dtype for table in tables}) == 1
        return one_type and _weighted(norm) and plain(drop, nn.Dropout)


def _readable_table(table: Any) -> bool:
    weight = table.weight
    return only_gathers(table) and weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.bfloat16)


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
        # all tokens of the longest sequence as queries, its first one as the only key
        tokens = hidden_states.new_empty(1, sequences.longest, 0)
        positions = stock.get_rel_pos(tokens[:, :1], tokens)
        if positions is None:
            return None
        ahead = positions.reshape(-1)
        return torch.cat([-ahead[1:].flip(0), ahead])


class RelativeBias(Optimized):
    """Override of an encoder that makes a position bias: the one of the longest sequence serves all of them."""

    stoker_part = "relative position bias"

    def compute_position_bias(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        stock: Any = super()
        if (sequences := ambient(x)) is None:
            return stock.compute_position_bias(x, *args, **kwargs)
        return stock.compute_position_bias(x.new_empty(1, sequences.longest, 0), *args, **kwargs)
