"""Writes the linear layers of a program, with their LoRA adapters and with frozen weights that are stored in fewer bits."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stoker.kernels import native
from stoker.kernels.program import Matrix, Program, native_products
from stoker.kernels.quantized import QuantizedWeight
from stoker.kernels.widening import Weight
from stoker.model.adapters import LinearParts
from stoker.model.gradient_tape import GradientTape, Unsupported, whole_parameter

__all__ = ["LinearWriter"]


@dataclass(frozen=True, eq=False)
class _Adapter:
    """One LoRA adapter of a linear layer, as in kernels/lora.py."""

    owner: int
    """Which of the weights side by side it belongs to."""
    a: Matrix
    b: Matrix
    a_tensor: Tensor
    b_tensor: Tensor
    scaling: float
    p: float
    key: str | None
    first: int
    """Its first column in h."""

    @property
    def rank(self) -> int:
        return self.a.rows

    def columns_of(self, h: Matrix) -> Matrix:
        return h.slice(self.first, self.rank)


@dataclass(frozen=True)
class _Codes:
    """A frozen weight in few bits: the arguments that have its codes and scales."""

    codes: str
    scales: str
    rows: int
    columns: int
    bits: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.columns


class LinearWriter(GradientTape):
    """Products in the same order, with the same engines, as kernels/lora.py."""

    def linear(self, paths: tuple[str, ...], x: Any, read: list[LinearParts], biases: list[Tensor]) -> Any:
        """As `lora_linear_packed`, whose products it writes in the same order."""
        weights = [self._stored(parts.weight) for parts in read]
        groups = self._adapter_groups(read)
        adapters = [one for group in groups for one in group]
        self.signature.append(("linear", len(biases), tuple(weight.shape for weight in weights)))
        self.signature += [(one.owner, one.scaling, one.p) for one in adapters]
        y = Matrix.in_workspace(x.rows, sum(weight.rows for weight in weights), x.dtype)
        h = Matrix.in_workspace(x.rows, sum(one.rank for one in adapters), x.dtype)
        for group in groups:
            self._write_inner(x, group, h)
        column = 0
        for place, weight in enumerate(weights):
            engine = native_products("nt", x.rows, weight.rows, x.columns, x.dtype)
            bias = biases[place] if biases else None
            self._check_size(weight.rows, bias)
            terms = [(x, self._widened(self.forward, weight, engine).t())]
            terms += [
                (one.columns_of(h), self._widened(self.forward, one.b, engine).t())
                for one in adapters
                if one.owner == place
            ]
            self.forward.multiply(
                terms, y.slice(column, weight.rows), engine, None if bias is None else self._parameter(bias),
                torch.float32 if bias is None else bias.dtype,
            )  # fmt: skip
            column += weight.rows
        tensors = [
            None if isinstance(parts.weight, QuantizedWeight) else whole_parameter(parts.weight) for parts in read
        ]
        trained = [*tensors, *biases, *(tensor for one in adapters for tensor in (one.a_tensor, one.b_tensor))]

        def entry() -> None:
            if (dy := self._total(y)) is not None:
                widths = [weight.rows for weight in weights]
                parts = [dy.slice(sum(widths[:place]), width) for place, width in enumerate(widths)]
                self._adapter_gradients(x, h, parts, weights, groups)
                self._base_gradients(x, parts, tensors, biases)

        return self._note(y, self._needs(x, *trained), entry)

    def _base_gradients(self, x: Matrix, parts: list[Matrix], tensors: list[Any], biases: list[Tensor]) -> None:
        for part, tensor in zip(parts, tensors, strict=True):
            if (gradient := self._gradient_of(tensor, (part.columns, x.columns))) is not None:
                self._weight_gradient(part, x, gradient)
        for part, bias in zip(parts, biases, strict=False):
            if (sums := self._gradient_of(bias)) is not None:
                self.backward.call(
                    "stoker_column_sums", x=part, sums=sums, row_stride=part.row_stride, rows=part.rows, columns=part.columns,
                    dtype=native.dtype_code(part.dtype), sums_dtype=native.dtype_code(bias.dtype),
                )  # fmt: skip

    def _weight_gradient(self, dy: Matrix, x: Matrix, to: Matrix) -> None:
        engine = native_products("tn", dy.columns, x.columns, x.rows, x.dtype)
        # torch's engine has one type
        result = to if engine != "torch" or to.dtype == x.dtype else Matrix.in_workspace(to.rows, to.columns, x.dtype)
        self.backward.multiply([(dy.t(), x)], result, engine)
        if result is not to:
            self._scale(self.backward, result, to)

    # --- Adapters and stored weights

    def _adapter_groups(self, read: list[LinearParts]) -> list[list[_Adapter]]:
        """The adapters that read the same input: those without dropout together, and each of the others alone."""
        owned = [(place, one) for place, parts in enumerate(read) for one in parts.adapters]
        dropped = [one.p * 65536.0 >= 0.5 for _, one in owned]  # the kernel rounds a smaller probability to zero
        groups: list[list[_Adapter]] = [[]]
        first = 0
        for wanted in (False, True):
            for (owner, one), drops in zip(owned, dropped, strict=True):
                if drops == wanted:
                    a, b = (self._dense(tensor) for tensor in (one.a, one.b))
                    p = one.p if drops else 0.0
                    made = _Adapter(owner, a, b, one.a, one.b, one.scaling, p, self._key(p), first)
                    groups += [[made]] if drops else []
                    groups[0] += [] if drops else [made]
                    first += made.rank
        return [group for group in groups if group]

    def _write_inner(self, x: Matrix, group: list[_Adapter], h: Matrix) -> None:
        """h_a = s_a dropout(x) A_a^T"""
        program, ranks = self.forward, sum(one.rank for one in group)
        engine = native_products("nt", x.rows, ranks, x.columns, x.dtype)
        a = self._one_above_another(program, group, engine)
        self._multiply_inner(program, (self._dropped_out(program, x, group[0]), a.t()), h, group, engine)

    def _adapter_gradients(
        self, x: Matrix, h: Matrix, parts: list[Matrix], weights: list[Any], groups: list[list[_Adapter]]
    ) -> None:
        """The gradients of the adapters, and that of x with what the weights add to it."""
        program = self.backward
        adapters = [one for group in groups for one in group]
        for one in adapters:
            if (gradient := self._gradient_of(one.b_tensor, one.b.shape)) is not None:
                self._weight_gradient(parts[one.owner], one.columns_of(h), gradient)
        dh = Matrix.in_workspace(h.rows, h.columns, h.dtype)
        if self._needs(x, *(one.a_tensor for one in adapters)):
            for one in adapters:
                engine = native_products("nn", h.rows, one.rank, one.b.rows, h.dtype)
                term = parts[one.owner], self._widened(program, one.b, engine)
                self._multiply_inner(program, term, dh, [one], engine)
        for group in groups:
            self._a_gradients(x, dh, [one for one in group if self._needs(one.a_tensor)], group)
        if self._needs(x):
            self._input_gradient(x, dh, parts, weights, groups)

    def _a_gradients(self, x: Matrix, dh: Matrix, wanted: list[_Adapter], group: list[_Adapter]) -> None:
        """dA of some adapters of a group. x is read once for all of them."""
        if not wanted:
            return
        program, ranks = self.backward, sum(one.rank for one in wanted)
        joined = dh.slice(wanted[0].first, ranks)
        # Dense, as the operators have it, where BLAS multiplies by a vector: with AVX-512, MKL rounds a strided one differently.
        if ranks < sum(one.rank for one in group) or (ranks == 1 and dh.columns > 1):
            joined = Matrix.in_workspace(dh.rows, ranks, dh.dtype)
            column = 0
            for one in wanted:
                self._copy(program, one.columns_of(dh), joined.slice(column, one.rank))
                column += one.rank
        source = self._dropped_out(program, x, group[0])
        gradients = [to for one in wanted if (to := self._gradient_of(one.a_tensor, one.a.shape)) is not None]
        if len(wanted) == 1:
            self._weight_gradient(joined, source, gradients[0])
            return
        made = Matrix.in_workspace(ranks, x.columns, gradients[0].dtype)
        self._weight_gradient(joined, source, made)
        row = 0
        for gradient in gradients:
            self._scale(program, made.t().slice(row, gradient.rows).t(), gradient)
            row += gradient.rows

    def _input_gradient(
        self, x: Matrix, dh: Matrix, parts: list[Matrix], weights: list[Any], groups: list[list[_Adapter]]
    ) -> None:
        program = self.backward
        still = [group for group in groups if group[0].key is None]
        lefts = [*parts, *(dh.slice(group[0].first, sum(one.rank for one in group)) for group in still)]
        engine = native_products("nn", x.rows, x.columns, sum(left.columns for left in lefts), x.dtype)
        rights = [self._widened(program, weight, engine) for weight in weights]
        rights += [self._one_above_another(program, group, engine) for group in still]
        dx = Matrix.in_workspace(x.rows, x.columns, x.dtype)
        program.multiply(list(zip(lefts, rights, strict=True)), dx, engine)
        for (one,) in (group for group in groups if group[0].key is not None):
            engine = native_products("nn", x.rows, x.columns, one.rank, x.dtype)
            more = Matrix.in_workspace(x.rows, x.columns, x.dtype)
            program.multiply([(one.columns_of(dh), self._widened(program, one.a, engine))], more, engine)
            self._add_rows(program, dx, self._dropped_out(program, more, one, more), dx)
        self._give(x, dx)

    def _dropped_out(self, program: Program, x: Matrix, adapter: _Adapter, to: Matrix | None = None) -> Matrix:
        """What an adapter reads."""
        if adapter.key is None:
            return x
        z = to or Matrix.in_workspace(x.rows, x.columns, x.dtype)
        program.call(
            "stoker_add_rows", x=x, z=z, x_stride=x.row_stride, z_stride=z.row_stride, rows=x.rows, columns=x.columns,
            key=adapter.key, p=adapter.p, dtype=native.dtype_code(x.dtype),
        )  # fmt: skip
        return z

    def _multiply_inner(
        self, program: Program, term: tuple[Matrix, Matrix], h: Matrix, group: list[_Adapter], engine: str
    ) -> None:
        """Writes the columns of some adapters in h: a product, times their scalings."""
        columns = h.slice(group[0].first, sum(one.rank for one in group))
        # A single column is computed apart, as the operators do: BLAS may round a dense one in another way.
        apart = columns.columns == 1 and h.columns > 1
        product = Matrix.in_workspace(h.rows, 1, h.dtype) if apart else columns
        program.multiply([term], product, engine)
        for scaling, several in itertools.groupby(group, key=lambda one: one.scaling):
            same = list(several)
            to = h.slice(same[0].first, sum(one.rank for one in same))
            if apart or scaling != 1.0:
                self._scale(program, product if apart else to, to, scaling)

    def _scale(self, program: Program, x: Matrix, z: Matrix, factor: float = 1.0) -> None:
        """z = factor * x, in the type of z"""
        program.call(
            "stoker_scale_rows", x=x, z=z, x_stride=x.row_stride, x_column=x.column_stride, z_stride=z.row_stride, rows=x.rows,
            columns=x.columns, factor=factor, dtype=native.dtype_code(x.dtype), z_dtype=native.dtype_code(z.dtype),
        )  # fmt: skip

    def _one_above_another(self, program: Program, group: list[_Adapter], engine: str) -> Matrix:
        """The A of several adapters as one matrix."""
        if len(group) == 1:
            return self._widened(program, group[0].a, engine)
        types = {one.a.dtype for one in group}
        dtype = types.pop() if len(types) == 1 and engine != "torch" else torch.float32
        joined = Matrix.in_workspace(sum(one.rank for one in group), group[0].a.columns, dtype)
        row = 0
        for one in group:
            self._scale(program, one.a, joined.t().slice(row, one.rank).t())
            row += one.rank
        return joined

    def _stored(self, weight: Weight) -> Matrix | _Codes:
        if isinstance(weight, QuantizedWeight):
            if not (weight.codes.is_contiguous() and weight.scales.is_contiguous()):
                raise Unsupported("codes that are not dense")
            return _Codes(self._parameter(weight.codes), self._parameter(weight.scales), *weight.shape, weight.bits)
        return self._dense(weight)

    def _dense(self, weight: Tensor) -> Matrix:
        if type(weight) not in (Tensor, nn.Parameter) or weight.dtype not in (torch.float32, torch.bfloat16):
            raise Unsupported("a weight of another type")
        return self._weight(weight)

    def _widened(self, program: Program, weight: Matrix | _Codes, engine: str) -> Matrix:
        """A weight as an engine takes it, as `widened` has it: torch's needs fp32, Stoker's own widen bf16 as they pack."""
        if isinstance(weight, Matrix) and (engine != "torch" or weight.dtype == torch.float32):
            return weight
        wide = Matrix.in_workspace(weight.rows, weight.columns, torch.float32)
        if isinstance(weight, Matrix):
            self._scale(program, weight, wide)
        else:
            program.call(
                "stoker_dequantize", values=wide, codes=weight.codes, scales=weight.scales, rows=wide.rows, columns=wide.columns,
                bits=weight.bits, dtype=native.dtype_code(wide.dtype),
            )  # fmt: skip
        return wide
