"""What one transformer layer computes, for every family of the table.

`run_layer` is the formula. It is written against `LayerParts`, which reads the weights of the stock modules, and of LoRA adapters
around them, and calls the native kernels over packed rows (tokens, width). A module that is wrapped otherwise, hooked or
parametrized is called instead, and its neighbours stay fused. Shape suffixes: T tokens, H hidden size, F feed-forward size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from stoker.kernels.activation import bias_activation, gated_activation
from stoker.kernels.attention import Relative, attention, attention_packed
from stoker.kernels.dropout import dropout
from stoker.kernels.lora import lora_linear_packed
from stoker.kernels.norm import dropout_add_layer_norm, dropout_add_rms_norm
from stoker.model.adapters import LinearParts, read_linear
from stoker.model.class_swap import Optimized, child, ordinary, plain, stock_class, unhooked
from stoker.model.families import Family
from stoker.model.leaf_modules import activation_kind, dropout_probability, rms_eps
from stoker.model.sequences import Sequences

__all__ = [
    "LayerParts",
    "Layout",
    "NormParts",
    "relative_positions",
    "rotary_halves",
    "run_layer",
    "score_bias",
    "weighted",
]

Layout = Literal["heads", "blocks"]
"""The order of q, k and v within a row: see `attention_packed`."""


def run_layer(m: LayerParts, x_TH: Any, sequences: Sequences, extra: dict[str, Any]) -> Any:
    """The layer's output: computed now, or by a program that `m` writes (program_writer.py)."""
    if m.row.piece == "attention":
        return m.project(m.row.out, _attend(m, x_TH, sequences, extra), whole=True)[0]
    if m.row.piece == "feed_forward":
        return m.project(m.row.down, _inner(m, x_TH), whole=True)[0]
    return (_pre_norm if m.row.pre_norm else _post_norm)(m, x_TH, sequences, extra)


def _post_norm(m: LayerParts, x_TH: Tensor, sequences: Sequences, extra: dict[str, Any]) -> Tensor:
    row = m.row
    context_TH = _attend(m, x_TH, sequences, extra)
    x_TH, context_TH = m.still_needed(sequences, x_TH, context_TH)
    y_TH, bias = m.project(row.out, context_TH)
    x_TH = m.add_norm(y_TH, bias, x_TH, row.out_dropout, row.attention_norm)
    y_TH, bias = m.project(row.down, _inner(m, x_TH))
    return m.add_norm(y_TH, bias, x_TH, row.down_dropout, row.down_norm)  # type: ignore[no-any-return]


def _pre_norm(m: LayerParts, x_TH: Tensor, sequences: Sequences, extra: dict[str, Any]) -> Tensor:
    row = m.row
    context_TH = _attend(m, m.norm(row.attention_norm, x_TH), sequences, extra)
    x_TH, context_TH = m.still_needed(sequences, x_TH, context_TH)
    parallel = bool(row.parallel and child(m.layer, row.parallel))
    y_TH, bias = m.project(row.out, context_TH, row.attention_output_norm, whole=parallel)
    if parallel:
        normed_TH = m.norm(row.down_norm, x_TH)
        x_TH = m.add(y_TH, x_TH, row.out_dropout)
    else:
        normed_TH, x_TH = m.add_norm(y_TH, bias, x_TH, row.out_dropout, row.down_norm, sum=True)
    y_TH, _ = m.project(row.down, _inner(m, normed_TH), row.down_output_norm, whole=True)
    return m.add(y_TH, x_TH, row.down_dropout)


def _attend(m: LayerParts, x_TH: Tensor, sequences: Sequences, extra: dict[str, Any]) -> Tensor:
    row, layer = m.row, m.layer
    qkv = m.project_together(row.projections(), x_TH)
    size = child(layer, row.head_size)
    heads, kv_heads = _head_counts(m, qkv.shape[1] // size)
    window = row.window(layer) if row.window else None
    options: dict[str, Any] = {
        "causal": row.causal,
        "window": None if window is None else (window, window),
        "rotary": rotary_halves(row, sequences, extra),
        "bias": m.score_bias(sequences, extra),
        "scale": child(layer, row.scale) if isinstance(row.scale, str) else row.scale and row.scale(layer),
        "softcap": child(layer, row.softcap) if row.softcap else None,
        "dropout_p": _attention_dropout(m),
        "relative": _relative(m, sequences, extra),
    }
    if row.query_norm is None or row.key_norm is None:
        layout: Layout = "heads" if row.packed_by_head else "blocks"
        return m.attend_packed(qkv, sequences, heads, kv_heads, layout=layout, **options)
    parts = m.split(qkv, [heads * size, kv_heads * size, kv_heads * size])
    q, k = (m.norm_heads(path, part, size) for path, part in zip((row.query_norm, row.key_norm), parts, strict=False))
    return m.attend(q, k, parts[2], sequences, size, **options)


def _relative(m: LayerParts, sequences: Sequences, extra: dict[str, Any]) -> Any:
    """The projected tables of relative positions (rows, heads * size), and the row of each distance."""
    parts, paths, found = m.row.relative, m.position_paths(), m.positions(sequences, extra)
    if parts is None or found is None:
        return None
    table, rows = found
    projected = m.project_together(tuple(paths.values()), m.dropout(parts.dropout, m.convert(table, sequences.dtype)))
    tables = m.split(projected, [projected.shape[1] // len(paths)] * len(paths))
    by_term = dict(zip(paths, tables, strict=True))
    return by_term.get("p2c"), by_term.get("c2p"), rows


def _once(sequences: Sequences, make: Callable[[], Any], *given: Any, span: int = 0) -> Any:
    """What `make` gives for arguments that all layers of a call are given: made once, so that its gradient is one too."""
    key = torch.is_grad_enabled(), span, *map(id, given)
    if key not in sequences.shared:
        sequences.shared[key] = given, make()  # the first are kept, so that no other object gets their id
    return sequences.shared[key][1]


def rotary_halves(row: Family, sequences: Sequences, extra: dict[str, Any]) -> tuple[Tensor, ...] | None:
    """The cosines and sines of this call's positions."""
    found = extra.get(row.rotary) if row.rotary else None
    if found is None:
        return None
    # stock passes both halves of the angles, which are equal; the kernel needs fp32, whatever the parameters are
    make = lambda: tuple(part[0, :, : part.shape[-1] // 2].float().contiguous() for part in found)  # noqa: E731
    return _once(sequences, make, found)  # type: ignore[no-any-return]


def score_bias(row: Family, sequences: Sequences, extra: dict[str, Any]) -> Tensor | None:
    """The bias of this call's scores (heads, n, n)."""
    found = extra.get(row.relative_bias) if row.relative_bias else None
    if found is None:
        return None
    return _once(sequences, lambda: found.squeeze(0).float().contiguous(), found)  # type: ignore[no-any-return]


@functools.lru_cache(maxsize=64)  # RelativeDistances gives the same tensor for batches of the same length
def _table_rows(distances: Tensor, span: int) -> tuple[Tensor, int, int]:
    """The row of each distance in a table of positions from which only those from the first to the last are taken."""
    with torch.inference_mode(False):  # a training step may use them later
        rows = (distances + span).clamp(0, 2 * span - 1)
        first, last = (int(end) for end in rows.aminmax())
        return rows - first, first, last


def relative_positions(
    row: Family, span: int, sequences: Sequences, extra: dict[str, Any]
) -> tuple[Tensor, Tensor] | None:
    """The embeddings of the positions that this call's distances need (rows, width), and the row of each distance."""
    parts = row.relative
    if parts is None or parts.table not in extra or parts.distances not in extra:
        return None
    table, distances = extra[parts.table], extra[parts.distances]

    def make() -> tuple[Tensor, Tensor]:
        rows, first, last = _table_rows(distances, span)
        return table[first : last + 1].contiguous(), rows

    return _once(sequences, make, table, distances, span=span)  # type: ignore[no-any-return]


def _head_counts(m: LayerParts, all_heads: int) -> tuple[int, int]:
    """How many heads q has, and how many k and v have, out of their sum."""
    if m.row.grouped is None:
        return all_heads // 3, all_heads // 3
    config = child(m.layer, m.row.grouped)
    return config.num_attention_heads, config.num_key_value_heads


def _attention_dropout(m: LayerParts) -> float:
    row = m.row
    if row.attention_dropout_called:
        return m.probability(row.attention_dropout) or 0.0  # PaddingFreeModel has checked that it can be read
    p = child(m.layer, row.attention_dropout)
    return getattr(p, "p", p) if m.layer.training else 0.0


def _inner(m: LayerParts, x_TH: Tensor) -> Tensor:
    """dropout(activation(up(x))), or with a gate dropout(activation(gate(x)) * up(x))"""
    row = m.row
    y_TF = m.project_together(row.ups(), x_TH) if row.gate else None
    y_TF, bias = m.project(row.up, x_TH) if y_TF is None else (y_TF, None)
    module = child(m.layer, row.activation)
    gated = row.gated or row.gate is not None
    return m.dropout(row.inner_dropout, m.activate(module, y_TF, bias, gated))


class NormParts(NamedTuple):
    """The weights of a norm."""

    weight: Tensor
    bias: Tensor | None
    eps: float
    plus_one: bool = False
    """One is added to `weight`."""


class LayerParts:
    """The modules of one layer, each used through its weights where that is equivalent to calling it."""

    def __init__(self, layer: nn.Module, row: Family, fuse: bool) -> None:
        self.layer, self.row, self.fuse = layer, row, fuse

    def score_bias(self, sequences: Sequences, extra: dict[str, Any]) -> Any:
        return score_bias(self.row, sequences, extra)

    def positions(self, sequences: Sequences, extra: dict[str, Any]) -> Any:
        """As `relative_positions`; None if the layer has no term for them."""
        if self.row.relative is None or not self.position_paths():
            return None
        return relative_positions(self.row, child(self.layer, self.row.relative.span), sequences, extra)

    def convert(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.to(dtype)

    def still_needed(self, sequences: Sequences, *rows: Tensor) -> tuple[Tensor, ...]:
        """The rows of the tokens whose output somebody reads; the rest of a layer computes each token by itself."""
        return tuple(map(sequences.firsts, rows)) if sequences.first_from is self.layer else rows

    def project(
        self, path: str, x: Tensor, norm: str | None = None, *, whole: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """norm(x W^T), and the bias that the next kernel still has to add; with `whole`, or a norm, the product adds it."""
        module = child(self.layer, path)
        if self.fuse and (parts := read_linear(module)) is not None:
            later = None if whole or norm is not None else parts.bias
            now = [parts.bias] if parts.bias is not None and later is None else []
            y = self.linear((path,), x, [parts], now)
        else:
            y, later = self.call(module, x), None
        return (y if norm is None else self.norm(norm, y)), later

    def project_together(self, paths: tuple[str, ...], x: Tensor) -> Tensor:
        """The projections of `x` by several linear layers side by side, as one product."""
        modules = [child(self.layer, path) for path in paths]
        if self.fuse and (read := _read_together(modules)) is not None:
            return self.linear(paths, x, read, [parts.bias for parts in read if parts.bias is not None])
        outputs = [self.call(module, x) for module in modules]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)

    def linear(self, paths: tuple[str, ...], x: Tensor, read: list[LinearParts], biases: list[Tensor]) -> Tensor:
        """The products of `x` with the weights of linear layers, side by side, plus `biases`, if there are any."""
        return lora_linear_packed(x, [parts.weight for parts in read], biases, [parts.adapters for parts in read])

    def split(self, x: Tensor, widths: list[int]) -> tuple[Tensor, ...]:
        return torch.split(x, widths, dim=1)

    def attend_packed(
        self, qkv: Tensor, sequences: Sequences, heads: int, kv_heads: int, *, layout: Layout, **options: Any
    ) -> Tensor:
        options["relative"] = _by_head(options["relative"], heads)
        return attention_packed(qkv, sequences.cu_seqlens, heads, kv_heads, layout=layout, **options)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, size: int, **options: Any) -> Tensor:
        """Attention of q and k (tokens, heads, size) and v (tokens, heads * size)."""
        options["relative"] = _by_head(options["relative"], q.shape[1])
        return attention(q, k, v.view(len(v), -1, size), sequences.cu_seqlens, **options).flatten(1)

    def activate(self, module: Any, x: Tensor, bias: Tensor | None, gated: bool) -> Tensor:
        if self.fuse and (kind := activation_kind(module)) is not None:
            return gated_activation(x, bias, kind) if gated else bias_activation(x, bias, kind)
        x = x if bias is None else self.add_bias(x, bias)
        first, *second = x.chunk(2, dim=-1) if gated else (x,)
        return module(first) * second[0] if gated else module(first)  # type: ignore[no-any-return]

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
            return self.fused_norm(weights, y, residual, bias, p, sum)
        total = self.add(y if bias is None else self.add_bias(y, bias), residual, dropout_path)
        normed = total if norm_path is None else self.call(child(self.layer, norm_path), total)
        return (normed, total) if sum else normed

    def fused_norm(
        self, weights: NormParts, x: Tensor, residual: Tensor | None, bias: Tensor | None, p: float, sum: bool
    ) -> Any:
        """norm(s), or with `sum` norm(s) and s, where s = residual + dropout(x + bias)"""
        common: dict[str, Any] = {"x_bias": bias, "p": p, "training": p > 0.0, "return_sum": sum, "eps": weights.eps}
        if self.row.norm == "layer":
            return dropout_add_layer_norm(x, residual, weights.weight, weights.bias, **common)
        weight = weights.weight + 1.0 if weights.plus_one else weights.weight
        return dropout_add_rms_norm(x, residual, weight, **common)

    def add(self, y: Tensor, residual: Tensor, dropout_path: str | None) -> Tensor:
        return self.plus(residual, self.dropout(dropout_path, y))

    def add_bias(self, x: Tensor, bias: Tensor) -> Tensor:
        return x + bias.to(x.dtype)

    def plus(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    def norm(self, path: str | None, x: Tensor) -> Tensor:
        if path is None:
            return x
        if not self.fuse or (weights := self._norm_weights(path)) is None:
            return self.call(child(self.layer, path), x)
        return self.fused_norm(weights, x, None, None, 0.0, False)  # type: ignore[no-any-return]

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
        return self.drop(x, p) if self.fuse and p is not None else self.call(child(self.layer, path or ""), x)

    def drop(self, x: Tensor, p: float) -> Tensor:
        return dropout(x, p)

    def call(self, module: nn.Module, x: Tensor) -> Tensor:
        """Calls a foreign module in the type of its parameters, which may differ from that of the activations."""
        if isinstance(module, Optimized):
            return module(x)  # type: ignore[no-any-return]
        # a layer of bitsandbytes has integer codes among its parameters
        parameter = next((one for one in module.parameters() if one.is_floating_point()), x)
        return module(x.to(parameter.dtype)).to(x.dtype)  # type: ignore[no-any-return]

    def probability(self, path: str | None) -> float | None:
        """The dropout probability in force, None if the module has to be called."""
        return dropout_probability(None if path is None else child(self.layer, path))

    def called(self) -> list[nn.Module]:
        """The modules that are called, because reading their weights would not be equivalent."""
        row = self.row
        if row.piece != "layer":
            return self._called_in_piece()
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

    def _called_in_piece(self) -> list[nn.Module]:
        attends = self.row.piece == "attention"
        together = self.row.projections() if attends else self.row.ups()
        modules = [child(self.layer, path) for path in together]
        last = child(self.layer, self.row.out if attends else self.row.down)
        called = modules if _read_together(modules) is None else []
        called += [last] if read_linear(last) is None else []
        activation: Any = None if attends else child(self.layer, self.row.activation)
        unknown = isinstance(activation, nn.Module) and activation_kind(activation) is None
        return [*called, activation] if unknown else called

    def adapted(self) -> list[nn.Module]:
        """The linear layers that are read together with their adapters."""
        if not self.fuse:
            return []
        called = self.called()
        if self.row.piece != "layer":
            attends = self.row.piece == "attention"
            some = (*self.row.projections(), self.row.out) if attends else (*self.row.ups(), self.row.down)
            return self._with_adapters(some, called)
        positions = (path for path in self.position_paths().values() if path not in self.row.projections())
        paths = (*self.row.projections(), self.row.out, *self.row.ups(), self.row.down, *positions)
        return self._with_adapters(paths, called)

    def _with_adapters(self, paths: tuple[str, ...], called: list[nn.Module]) -> list[nn.Module]:
        linears = [module for path in paths if (module := child(self.layer, path)) not in called]
        return [module for module in linears if (parts := read_linear(module)) is not None and parts.adapters]

    def _norm_weights(self, path: str | None) -> NormParts | None:
        """The weights of a norm; None if it has to be called."""
        if path is None:
            return None
        norm = child(self.layer, path)
        if self.row.norm == "layer":
            return NormParts(norm.weight, norm.bias, norm.eps) if weighted(norm) else None
        # the family's own class, whose formula the table states
        if stock_class(type(norm)).__module__ != stock_class(type(self.layer)).__module__:
            return None
        eps = rms_eps(norm)
        if eps is None or not (unhooked(norm) and ordinary(norm)):
            return None
        return NormParts(norm.weight, None, eps, plus_one=self.row.norm == "rms_plus_one")


def _by_head(relative: Any, heads: int) -> Relative | None:
    """Tables of relative positions as attention takes them: (rows, heads, size)."""
    if relative is None:
        return None
    q, k, rows = relative
    q, k = (None if table is None else table.unflatten(1, (heads, -1)) for table in (q, k))
    return q, k, rows


def _read_together(modules: list[Any]) -> list[LinearParts] | None:
    """The weights of these linear layers, None if they cannot be read side by side: all of them, with a bias each or none."""
    read = [parts for module in modules if (parts := read_linear(module)) is not None]
    return read if len(read) == len(modules) and len({parts.bias is None for parts in read}) == 1 else None


def weighted(norm: Any) -> bool:
    """Whether the weights of this LayerNorm can be read: it has some, for the last dimension only."""
    return plain(norm, nn.LayerNorm) and norm.weight is not None and norm.weight.dim() == 1
