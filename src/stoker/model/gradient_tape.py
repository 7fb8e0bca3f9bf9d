"""Values of a layer's program and their gradients: what the writers of its operators (linear_writer.py, program_writer.py) share.

Matrices take the place of tensors, names of arguments that of parameters. Each operator notes how its gradient is written; the
notes are read in reverse.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stoker.kernels import native
from stoker.kernels.program import Matrix, Program
from stoker.model.layer_parts import LayerParts

__all__ = ["GradientTape", "Unsupported", "whole_parameter"]


class Unsupported(Exception):
    """The layer has a part that a program cannot contain."""


def whole_parameter(weight: Any) -> Any:
    """The parameter that a weight is, or is the transpose of."""
    return weight if weight._base is None else weight._base


class GradientTape(LayerParts):
    """The two programs of a layer while they are written."""

    def __init__(self, layer: Any, hidden: Tensor) -> None:
        super().__init__(layer, layer.stoker_row, True)
        _, rows, width = hidden.shape
        self.rows, self.dtype = rows, hidden.dtype
        self.input_gradient = hidden.requires_grad and torch.is_grad_enabled()
        threads = native.threads()
        self.forward, self.backward = Program(threads), Program(threads)
        self.x = Matrix.of_argument("x", rows, width, self.dtype)
        self.tensors: list[Tensor] = []
        self.inputs: list[tuple[Matrix, Tensor]] = []
        self.plus_one: set[int] = set()
        self.transposed: set[int] = set()
        self.signature: list[Any] = []
        self.keys = self.span = 0
        self._head_size = 0
        """Of the heads whose norm is being written; 0: the norm is of whole rows."""
        self._tape: list[Callable[[], None]] = []
        self._gradients: dict[int, list[Matrix]] = {}
        self._needing: dict[int, Matrix] = {}
        self._written: set[str] = set()
        self._repeated: list[tuple[Matrix, Matrix]] = []
        self._split_from: dict[int, tuple[Matrix, int]] = {}
        self._split_into: dict[int, Matrix] = {}
        if self.input_gradient:
            self._needing[id(self.x)] = self.x

    def _new(self, rows: int, columns: int) -> Matrix:
        return Matrix.in_workspace(rows, columns, self.dtype)

    def _input(self, tensor: Tensor) -> Matrix:
        """A tensor that the layer is given beside its input, with its last dimension as columns."""
        rows, columns = tensor.numel() // tensor.shape[-1], tensor.shape[-1]
        value = Matrix.of_argument(f"input{len(self.inputs)}", rows, columns, tensor.dtype)
        self.inputs.append((value, tensor))
        if tensor.requires_grad and torch.is_grad_enabled():
            self._needing[id(value)] = value
        return value

    def _parameter(self, tensor: Tensor, plus_one: bool = False) -> str:
        for number, known in enumerate(self.tensors):
            if known is tensor:
                self.signature.append(number)
                return f"p{number}"
        of_kernels = not tensor.is_floating_point() or tensor.dtype in (torch.float32, torch.bfloat16)
        dense = tensor.dim() == 2 or tensor.is_contiguous()  # of matrices the strides are looked at
        if not (of_kernels and dense and tensor.is_cpu and tensor.numel()):
            raise Unsupported("a parameter that the kernels do not read")  # the operators say what is wrong with it
        if plus_one:
            self.plus_one.add(len(self.tensors))
        self.tensors.append(tensor)
        self.signature.append((tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad, plus_one))
        return f"p{len(self.tensors) - 1}"

    @staticmethod
    def _check_size(columns: int, *vectors: Tensor | None) -> None:
        if any(one is not None and one.shape != (columns,) for one in vectors):
            raise Unsupported("a bias or a weight of another size")

    def _weight(self, weight: Tensor) -> Matrix:
        """A weight (out, in), or the transpose of a parameter (in, out), as transformers' Conv1D has it."""
        parameter = whole_parameter(weight)
        name = self._parameter(parameter)
        dense = parameter.is_contiguous() or (not parameter.requires_grad and parameter.t().is_contiguous())
        if not dense or weight.dim() != 2 or weight.shape not in (parameter.shape, parameter.shape[::-1]):
            raise Unsupported("a weight that is not dense")
        if parameter is not weight:
            self.transposed.add(int(name[1:]))
        rows, columns = weight.shape
        return Matrix.of_argument(name, rows, columns, weight.dtype, weight.stride())

    def _gradient_of(self, tensor: Tensor | None, shape: tuple[int, int] | None = None) -> Matrix | None:
        """Where to write the gradient of a parameter; None if it is frozen, or there is none.

        If a kernel has written one already, the next goes to the workspace, and `_add_repeated` adds it to the first.
        """
        if tensor is None or not tensor.requires_grad:
            return None
        name = f"g{self._parameter(tensor)}"
        rows, columns = shape or (1, tensor.numel())
        whole = Matrix.of_argument(name, rows, columns, tensor.dtype)
        if name not in self._written:
            self._written.add(name)
            return whole
        more = Matrix.in_workspace(rows, columns, tensor.dtype)
        self._repeated.append((whole, more))
        return more

    def _add_repeated(self) -> None:
        for whole, more in self._repeated:
            self._add_rows(self.backward, whole, more, whole)
        self._repeated.clear()

    def _key(self, p: float) -> str | None:
        if p <= 0.0:
            return None
        self.keys += 1
        return f"key{self.keys - 1}"

    def _note(self, result: Matrix, needs: bool, entry: Callable[[], None]) -> Matrix:
        """Puts the gradient of an operator on the tape, if one is needed."""
        if needs and torch.is_grad_enabled():
            self._needing[id(result)] = result
            self._tape.append(entry)
        return result

    def _needs(self, *values: Matrix | Tensor | None) -> bool:
        return any(
            value.requires_grad if isinstance(value, Tensor) else id(value) in self._needing
            for value in values
            if value is not None
        )

    def _give(self, value: Matrix | None, gradient: Matrix) -> None:
        if value is not None and id(value) in self._needing:
            self._gradients.setdefault(id(value), []).append(gradient)

    def _total(self, value: Matrix, to: Matrix | None = None) -> Matrix | None:
        """The gradient of a value: the sum of those that its users gave, in `to` if that is given."""
        found = self._gradients.pop(id(value), [])
        if not found:
            return None
        if to is None and len(found) == 1:
            return found[0]
        total = found[0]
        for place, more in enumerate(found[1:], 2):
            last = place == len(found) and to is not None
            result = to if last and to is not None else Matrix.in_workspace(value.rows, value.columns, value.dtype)
            self._add_rows(self.backward, total, more, result)
            total = result
        if to is not None and len(found) == 1:
            self._copy(self.backward, total, to)
            return to
        return total

    def _add_rows(self, program: Program, x: Matrix, y: Matrix, z: Matrix) -> None:
        program.call(
            "stoker_add_rows", x=x, y=y, z=z, x_stride=x.row_stride, y_stride=y.row_stride, z_stride=z.row_stride, rows=z.rows,
            columns=z.columns, dtype=native.dtype_code(x.dtype), y_dtype=native.dtype_code(y.dtype),
        )  # fmt: skip

    def _copy(self, program: Program, y: Matrix, z: Matrix) -> None:
        program.call(
            "stoker_add_rows", y=y, z=z, y_stride=y.row_stride, z_stride=z.row_stride, rows=z.rows, columns=z.columns,
            dtype=native.dtype_code(z.dtype), y_dtype=native.dtype_code(y.dtype),
        )  # fmt: skip
