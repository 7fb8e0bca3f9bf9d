"""Writes a layer down as two programs of kernels, one per direction (layer_program.py runs them).

`ProgramWriter` takes the place of `LayerParts` while `run_layer` runs, and writes the kernels down instead of calling them: those
of the layer, and in reverse those of its gradients.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from stoker.kernels import native
from stoker.kernels.attention import gradient_parts
from stoker.kernels.program import Buffer, Matrix, Program
from stoker.model.class_swap import child, plain
from stoker.model.gradient_tape import Unsupported
from stoker.model.layer_parts import Layout, NormParts, run_layer
from stoker.model.leaf_modules import activation_kind
from stoker.model.linear_writer import LinearWriter
from stoker.model.sequences import Sequences

__all__ = ["LayerPrograms", "ProgramWriter", "Unsupported", "key_chunk"]

_UNLIMITED = 2**62


@functools.cache
def key_chunk() -> int:
    return int(native.library().stoker_attention_key_chunk())


@dataclass
class LayerPrograms:
    """The two directions of a layer."""

    forward: Program
    backward: Program | None
    saved: int
    """Bytes that forward leaves for backward."""
    keys: int
    """How many dropout keys a call needs."""
    trained: list[bool]
    """Which tensors get a gradient: first the parameters, then what the layer gets beside its input."""
    transposed: frozenset[int]
    """Which tensors get the transpose of the gradient that the program computes."""
    plus_one: frozenset[int]
    """Which tensors are used with one added to them."""
    input_gradient: bool
    bytes: list[int]
    """The size of each tensor."""
    rows: int
    """Of the layer's output."""


class ProgramWriter(LinearWriter):
    """Writes what `run_layer` asks for as kernels of two programs."""

    def write(self, sequences: Sequences, extra: dict[str, Any]) -> LayerPrograms:
        y = run_layer(self, self.x, sequences, extra)
        if y.buffer.base is not None or y.row_stride != y.columns:
            raise Unsupported("a layer that returns its input")
        y.buffer.base = "y"
        wanted = torch.is_grad_enabled() and id(y) in self._needing
        if wanted:
            self._gradients[id(y)] = [Matrix.of_argument("dy", y.rows, y.columns, y.dtype)]
            for entry in reversed(self._tape):
                entry()
                self._add_repeated()
            if self.input_gradient:
                self._total(self.x, Matrix.of_argument("dx", self.rows, self.x.columns, self.dtype))
            for number, (value, tensor) in enumerate(self.inputs):
                if tensor.requires_grad:
                    self._total(value, Matrix.of_argument(f"ginput{number}", *value.shape, value.dtype))
        saved = self._saved()
        common = ["starts", "sequences", "cosine", "sine", "distances", "reach"]
        common += [f"key{number}" for number in range(self.keys)]
        names = [f"p{number}" for number in range(len(self.tensors))]
        names += [f"input{number}" for number in range(len(self.inputs))]
        common += names
        size = self.forward.finish(["workspace", "x", "y", "saved", *common], saved)
        self.backward.finish(["workspace", "x", "dy", "saved", *common, "dx", *(f"g{name}" for name in names)])
        trained = [wanted and one.requires_grad for one in (*self.tensors, *(tensor for _, tensor in self.inputs))]
        return LayerPrograms(
            forward=self.forward,
            backward=self.backward if wanted else None,
            saved=size,
            keys=self.keys,
            trained=trained,
            transposed=frozenset(self.transposed),
            plus_one=frozenset(self.plus_one),
            input_gradient=self.input_gradient,
            bytes=[one.nbytes for one in (*self.tensors, *(tensor for _, tensor in self.inputs))],
            rows=y.rows,
        )

    def _saved(self) -> list[Buffer]:
        """Buffers of forward that backward reads."""
        return [buffer for buffer in self.forward.buffers() if buffer.base is None and id(self.backward) in buffer.uses]

    # --- The operators of LayerParts

    def call(self, module: nn.Module, x: Any) -> Any:
        if plain(module, nn.Identity):
            return x
        raise Unsupported(f"{type(module).__name__} has to be called")

    def add_bias(self, x: Any, bias: Tensor) -> Any:
        raise Unsupported("a bias before a module that has to be called")

    def still_needed(self, sequences: Sequences, *rows: Any) -> tuple[Any, ...]:
        if sequences.first_from is not self.layer:
            return rows
        return tuple(self._firsts(x, sequences.starts.numel() - 1) for x in rows)

    def _firsts(self, x: Matrix, count: int) -> Matrix:
        """The first row of each sequence."""
        y = self._new(count, x.columns)
        common: dict[str, Any] = {
            "ids": "starts", "tokens": count, "rows": x.rows, "columns": x.columns, "dtype": native.dtype_code(x.dtype),
            "table_dtype": native.dtype_code(x.dtype),
        }  # fmt: skip
        self.forward.call("stoker_embedding_lookup", table=x, y=y, **common)

        def entry() -> None:
            if (dy := self._total(y)) is not None:
                dx = self._new(x.rows, x.columns)
                self.backward.call("stoker_embedding_scatter", dy=dy, dtable=dx, skip=-1, **common)
                self._give(x, dx)

        return self._note(y, self._needs(x), entry)

    def convert(self, x: Any, dtype: torch.dtype) -> Any:
        if x.dtype == dtype:
            return x
        y = Matrix.in_workspace(x.rows, x.columns, dtype)
        self._copy(self.forward, x, y)

        def entry() -> None:
            if (dy := self._total(y)) is not None:
                dx = Matrix.in_workspace(x.rows, x.columns, x.dtype)
                self._copy(self.backward, dy, dx)
                self._give(x, dx)

        return self._note(y, self._needs(x), entry)

    def split(self, x: Any, widths: list[int]) -> Any:
        parts, column = [], 0
        for width in widths:
            part = x.slice(column, width)
            self._split_from[id(part)] = x, column
            parts.append(part)
            column += width
        if self._needs(x):
            self._needing.update((id(part), part) for part in parts)
            self._tape.append(lambda: self._split_gradient(x, parts))
        return tuple(parts)

    def _split_gradient(self, x: Matrix, parts: list[Matrix]) -> None:
        """The gradients of the parts side by side. One that was written there already stays where it is."""
        dx = self._side_by_side(x)
        for part in parts:
            found = self._total(part)
            if found is not None and found.buffer is not dx.buffer:
                self._copy(self.backward, found, dx.slice(self._split_from[id(part)][1], part.columns))
        self._give(x, dx)

    def _side_by_side(self, x: Matrix) -> Matrix:
        if id(x) not in self._split_into:
            self._split_into[id(x)] = self._new(x.rows, x.columns)
        return self._split_into[id(x)]

    def fused_norm(self, weights: NormParts, x: Any, residual: Any, bias: Tensor | None, p: float, sum: bool) -> Any:
        p = 0.0 if p * 65536.0 < 0.5 else p
        rms = self.row.norm != "layer"
        columns = weights.weight.shape[0] if weights.weight.shape == (self._head_size,) else x.columns
        self._check_size(columns, weights.weight, weights.bias)
        self._check_size(x.columns, bias)
        rows = x.rows * x.columns // columns
        self.signature.append(("norm", columns, p, weights.eps, rms, sum, bias is None, residual is None))
        if x.row_stride != x.columns:
            dense = Matrix.in_workspace(x.rows, x.columns, x.dtype)
            self._copy(self.forward, x, dense)
            source, x = x, self._note(dense, self._needs(x), lambda: self._pass_on(dense, source))
        y, z = self._new(x.rows, x.columns), self._new(x.rows, x.columns) if sum else None
        stats = Matrix.in_workspace(2, rows, torch.float32)
        key = self._key(p)
        weight = self._parameter(weights.weight, weights.plus_one)
        common: dict[str, Any] = {
            "x_bias": None if bias is None else self._parameter(bias), "weight": weight, "stats": stats, "rows": rows,
            "columns": columns, "key": key, "p": p, "rms": int(rms), "dtype": native.dtype_code(x.dtype),
            "x_bias_dtype": native.parameter(bias), "weight_dtype": native.parameter(weights.weight),
            "bias_dtype": native.parameter(weights.bias), "eps": weights.eps,
        }  # fmt: skip
        self.forward.call(
            "stoker_layer_norm_forward", x=x, residual=residual, y=y, z=z,
            bias=None if weights.bias is None else self._parameter(weights.bias), **common,
        )  # fmt: skip
        needs = self._needs(x, residual, weights.weight, weights.bias, bias)

        def entry() -> None:
            dy, dz = self._total(y), None if z is None else self._total(z)
            if dy is None:
                raise Unsupported("a norm whose result nobody reads")
            dsum = self._new(x.rows, x.columns) if key is None or residual is not None else None
            dx = self._new(x.rows, x.columns) if key is not None else None
            self.backward.call(
                "stoker_layer_norm_backward", x=None if sum else x, residual=None if sum else residual, z=z, dy=dy, dz=dz, dx=dx,
                dresidual=dsum, dweight=self._gradient_of(weights.weight), dbias=self._gradient_of(weights.bias),
                dx_bias=self._gradient_of(bias), **common,
            )  # fmt: skip
            for value, gradient in ((x, dx if key is not None else dsum), (residual, dsum)):
                if gradient is not None:
                    self._give(value, gradient)

        self._note(y, needs, entry)
        if z is not None and needs:
            self._needing[id(z)] = z
        return (y, z) if sum else y

    def norm_heads(self, path: str, x: Any, size: int) -> Any:
        self._head_size = size
        try:
            return self.norm(path, x)
        finally:
            self._head_size = 0

    def _pass_on(self, result: Matrix, source: Matrix) -> None:
        if (gradient := self._total(result)) is not None:
            self._give(source, gradient)

    def activate(self, module: Any, x: Any, bias: Tensor | None, gated: bool) -> Any:
        kind = activation_kind(module)
        if kind is None:
            raise Unsupported("an activation that has to be called")
        columns = x.columns // 2 if gated else x.columns
        y = self._new(x.rows, columns)
        self.signature.append(("activation", kind, gated, bias is None))
        gate, up = (x.slice(0, columns), x.slice(columns, columns)) if gated else (x, None)
        if bias is not None and gated:
            raise Unsupported("a gated activation with a bias")
        self._check_size(columns, bias)
        common: dict[str, Any] = {
            "x": gate, "up": up, "x_bias": None if bias is None else self._parameter(bias), "x_stride": x.row_stride,
            "up_stride": x.row_stride if gated else 0, "rows": x.rows, "columns": columns,
            "kind": native.constants("stoker_activation")[kind.upper()], "gated": int(gated),
            "dtype": native.dtype_code(x.dtype), "bias_dtype": native.parameter(bias),
        }  # fmt: skip
        self.forward.call("stoker_activation_forward", y=y, **common)

        def entry() -> None:
            dy = self._total(y)
            if dy is None:
                return
            dx = self._new(x.rows, x.columns)
            self.backward.call(
                "stoker_activation_backward", dy=dy, dx=dx.slice(0, columns), dup=dx.slice(columns, columns) if gated else None,
                dx_stride=x.columns, dup_stride=x.columns if gated else 0, dx_bias=self._gradient_of(bias), **common,
            )  # fmt: skip
            self._give(x, dx)

        return self._note(y, self._needs(x, bias), entry)

    def drop(self, x: Any, p: float) -> Any:
        self.signature.append(("dropout", p))
        y = self._new(x.rows, x.columns)
        key = self._key(p)
        common: dict[str, Any] = {
            "rows": x.rows, "columns": x.columns, "key": key, "p": p, "dtype": native.dtype_code(x.dtype),
            "z_stride": x.columns,
        }  # fmt: skip
        self.forward.call("stoker_add_rows", x=x, z=y, x_stride=x.row_stride, **common)

        def entry() -> None:
            if (dy := self._total(y)) is not None:
                dx = self._new(x.rows, x.columns)
                self.backward.call("stoker_add_rows", x=dy, z=dx, x_stride=dy.row_stride, **common)
                self._give(x, dx)

        return self._note(y, self._needs(x), entry)

    def plus(self, x: Any, y: Any) -> Any:
        self.signature.append("plus")
        z = self._new(x.rows, x.columns)
        self._add_rows(self.forward, x, y, z)

        def entry() -> None:
            if (dz := self._total(z)) is not None:
                self._give(x, dz)
                self._give(y, dz)

        return self._note(z, self._needs(x, y), entry)

    # --- Attention

    def attend_packed(
        self, qkv: Any, sequences: Sequences, heads: int, kv_heads: int, *, layout: Layout, **options: Any
    ) -> Any:
        size = qkv.columns // (heads + 2 * kv_heads)
        if layout == "heads":
            views = [(qkv.slice(place * size, 1), 3 * size) for place in range(3)]
        else:
            views = [(qkv.slice(first * size, 1), size) for first in (0, heads, heads + kv_heads)]

        def gradients() -> list[Matrix]:
            dqkv = self._new(qkv.rows, qkv.columns)
            self._give(qkv, dqkv)
            return [dqkv.slice(view.start - qkv.start, 1) for view, _ in views]

        return self._attention(
            [view for view, _ in views], [stride for _, stride in views], heads, kv_heads, size, options,
            self._needs(qkv), gradients, sequences,
        )  # fmt: skip

    def attend(self, q: Any, k: Any, v: Any, sequences: Sequences, size: int, **options: Any) -> Any:
        qkv, first = self._split_from[id(v)]

        def gradients() -> list[Matrix]:
            dq, dk = self._new(q.rows, q.columns), self._new(k.rows, k.columns)
            dv = self._side_by_side(qkv).slice(first, v.columns)  # its strides must be those of v
            self._give(q, dq)
            self._give(k, dk)
            self._give(v, dv)
            return [dq, dk, dv]

        return self._attention(
            [q, k, v], [size] * 3, q.columns // size, k.columns // size, size, options, self._needs(q, k, v), gradients,
            sequences,
        )  # fmt: skip

    def _attention(
        self, matrices: list[Matrix], head_strides: list[int], heads: int, kv_heads: int, size: int, options: dict[str, Any],
        needs: bool, gradients: Callable[[], list[Matrix]], sequences: Sequences,
    ) -> Matrix:  # fmt: skip
        p, window, rotary, scale, softcap = (options[n] for n in ("dropout_p", "window", "rotary", "scale", "softcap"))
        left, right = (_UNLIMITED if side < 0 else side for side in (window or (-1, -1)))
        tokens = matrices[0].rows
        out = self._new(tokens, heads * size)
        lse = Matrix.in_workspace(tokens, heads, torch.float32)
        key = self._key(p)
        numbers: dict[str, Any] = {
            "heads": heads, "kv_heads": kv_heads, "head_size": size, "left": left, "right": 0 if options["causal"] else right,
            "scale": 1.0 / math.sqrt(size) if scale is None else float(scale), "softcap": float(softcap or 0.0), "p": p,
            "rotary_half": 0 if rotary is None else rotary[0].shape[1], "dtype": native.dtype_code(self.dtype),
        }  # fmt: skip
        self.signature.append(("attention", tuple(sorted(numbers.items())), tuple(head_strides), len(matrices)))
        strides: dict[str, Any] = {}
        for name, matrix, head in zip("qkv", matrices, head_strides, strict=True):
            strides |= {name: matrix, f"{name}_token": matrix.row_stride, f"{name}_head": head}
        common: dict[str, Any] = {
            **numbers, **strides, "out": out, "lse": lse, "starts": "starts", "key_starts": "starts", "sequences": "sequences",
            "key": key, "cosine": None if rotary is None else "cosine", "sine": None if rotary is None else "sine",
        }  # fmt: skip
        trained = self._score_terms(options, heads, common)
        self.forward.call("stoker_attention_forward", **common)

        def entry() -> None:
            dout = self._total(out)
            if dout is None:
                return
            if dout.row_stride != dout.columns:
                raise Unsupported("a gradient that is not dense")
            dq, dk, dv = gradients()
            groups = gradient_parts(sequences.starts.numel() - 1)
            parts = {
                f"d{name}": Matrix.in_workspace(groups * value.rows, value.columns, torch.float32)
                for name, value in trained.items()
                if self._needs(value)
            }
            chunks = -(-sequences.longest // key_chunk())
            dq_parts = Matrix.in_workspace(chunks * tokens, heads * size, torch.float32) if chunks > 1 else None
            self.backward.call(
                "stoker_attention_backward", dout=dout, dq=dq, dk=dk, dv=dv, dq_parts=dq_parts, groups=groups, **parts, **common
            )  # fmt: skip
            for name, value in trained.items():
                if self._needs(value):  # the first part is the sum of all
                    self._give(value, replace(parts[f"d{name}"], rows=value.rows))

        return self._note(out, needs or self._needs(*trained.values()), entry)

    def _score_terms(self, options: dict[str, Any], heads: int, call: dict[str, Any]) -> dict[str, Matrix]:
        """Adds the bias of scores and the tables of relative positions to an attention call; returns them by their fields."""
        bias, (position_q, position_k, _) = options["bias"], options["relative"] or (None, None, None)
        given = {"bias": bias, "position_q": position_q, "position_k": position_k}
        found: dict[str, Matrix] = {name: value for name, value in given.items() if value is not None}
        self.signature.append(tuple(found))
        call |= found
        if bias is not None:
            call |= {"bias_rows": bias.rows // heads, "bias_columns": bias.columns}
        for name in ("position_q", "position_k"):
            if name in found:
                call |= {f"{name}_row": found[name].row_stride, "position_rows": found[name].rows}
                call |= {"distance_rows": "distances", "reach": "reach"}
        return found

    def score_bias(self, sequences: Sequences, extra: dict[str, Any]) -> Any:
        bias = super().score_bias(sequences, extra)
        return None if bias is None else self._input(bias)

    def positions(self, sequences: Sequences, extra: dict[str, Any]) -> Any:
        found = super().positions(sequences, extra)
        if found is None or self.row.relative is None:
            return None
        self.span = child(self.layer, self.row.relative.span)
        return self._input(found[0]), found[1]
