"""Programs: several kernels, described once per shape, that one native call runs (csrc/kernels/program.cpp).

A `Program` is a list of kernels with their call structs. Their pointers are not known when it is written: each belongs to a
`Buffer`, which is an argument of the call (an input, an output, a parameter) or a piece of a workspace. `finish` places the
buffers in the workspaces, and `run` sets all pointers and runs the kernels. Products may use MKL's `sgemm_` inside libtorch,
which gives bit for bit what torch.mm gives.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from stoker.kernels import engines, microkernels, native, products

__all__ = ["Buffer", "Matrix", "Program", "Workspace", "native_products"]

_LINE = 64  # bytes: buffers begin at a cache line


@dataclass(eq=False)
class Buffer:
    """Memory of a program: an argument of its call with the name `base`, or a piece of a workspace that `finish` chooses."""

    size: int = 0
    base: str | None = None
    offset: int = 0
    uses: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Program (by id) -> the first and the last of its kernels that touch this buffer."""


@dataclass(frozen=True, eq=False)
class Matrix:
    """A matrix in a buffer: element (i, j) is at start + i * row_stride + j * column_stride."""

    buffer: Buffer
    rows: int
    columns: int
    dtype: torch.dtype
    row_stride: int
    column_stride: int = 1
    start: int = 0

    @staticmethod
    def of_argument(
        base: str, rows: int, columns: int, dtype: torch.dtype, strides: Sequence[int] | None = None
    ) -> Matrix:
        row_stride, column_stride = strides or (columns, 1)
        return Matrix(Buffer(base=base), rows, columns, dtype, row_stride, column_stride)

    @staticmethod
    def in_workspace(rows: int, columns: int, dtype: torch.dtype) -> Matrix:
        return Matrix(Buffer(rows * columns * dtype.itemsize), rows, columns, dtype, columns)

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.columns

    def slice(self, first: int, columns: int) -> Matrix:
        """Some of its columns."""
        return replace(self, columns=columns, start=self.start + first * self.column_stride)

    def t(self) -> Matrix:
        return replace(
            self, rows=self.columns, columns=self.rows, row_stride=self.column_stride, column_stride=self.row_stride
        )

    @property
    def address(self) -> tuple[Buffer, int]:
        """The buffer, and where in it the matrix begins, in bytes."""
        return self.buffer, self.start * self.dtype.itemsize


class Workspace:
    """Memory that programs run in one after the other: kept, and as large as the largest of them needs."""

    def __init__(self) -> None:
        self._tensor = torch.empty(0, dtype=torch.uint8)

    def address(self, size: int) -> int:
        if self._tensor.numel() < size:
            self._tensor = torch.empty(0, dtype=torch.uint8)  # freed before more is allocated
            self._tensor = torch.empty(size, dtype=torch.uint8)
        return self._tensor.data_ptr()


class Program:
    """Kernels to be run in order."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.workspace = 0
        self._lock = threading.Lock()
        self._steps: list[tuple[int, Any]] = []
        self._slots: list[tuple[int, Buffer, int]] = []
        self._alive: list[Any] = []

    def call(self, function: str, **fields: Any) -> None:
        """Adds a kernel. A field is a number, a Matrix (its address is passed), or a name: that argument of the call itself."""
        given = {name: value for name, value in fields.items() if value is not None}
        numbers = {name: value for name, value in given.items() if not isinstance(value, (Matrix, str))}
        call = native.struct(_STRUCTS[function])(threads=self.threads, **numbers)
        for name, value in given.items():
            if isinstance(value, (Matrix, str)):
                self._slot(call, name, value)
        self._add(function, call)

    def multiply(
        self, terms: Sequence[tuple[Matrix, Matrix]], out: Matrix, engine: str, bias: str | None = None,
        bias_dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        """As `products.multiply`. `bias` names an argument."""
        if engine == "torch":
            for number, (a, b) in enumerate(terms):
                self.call(
                    "stoker_blas_product", sgemm=_sgemm(), a=a, b=b, c=out, bias=None if number else bias, rows=out.rows,
                    columns=out.columns, depth=a.columns, a_row=a.row_stride, a_column=a.column_stride, b_row=b.row_stride,
                    b_column=b.column_stride, c_stride=out.row_stride, bias_dtype=native.dtype_code(bias_dtype),
                    accumulate=int(number > 0),
                )  # fmt: skip
            return
        kernel = microkernels.find(terms[0][0].dtype) if engine == "onednn" else None
        operands = native.struct("stoker_operand") * len(terms)
        depths = (ctypes.c_int64 * len(terms))(*(a.columns for a, _ in terms))
        sides = []
        for side in zip(*terms, strict=True):
            array = operands(*(self._operand(matrix) for matrix in side))
            for place, matrix in enumerate(side):
                self._slot(array[place], "data", matrix)
            sides.append(array)
        call = native.struct("stoker_product_call")(
            a=sides[0], b=sides[1], depths=ctypes.addressof(depths), microkernel=kernel.multiply if kernel else None,
            release=kernel.release if kernel else None, terms=len(terms), rows=out.rows, columns=out.columns,
            c_stride=out.row_stride, c_dtype=native.dtype_code(out.dtype), bias_dtype=native.dtype_code(bias_dtype),
            threads=self.threads,
        )  # fmt: skip
        self._slot(call, "c", out)
        if bias is not None:
            self._slot(call, "bias", bias)
        self._alive += [*sides, depths]
        self._add("stoker_product", call)

    def buffers(self) -> list[Buffer]:
        """The buffers that its kernels use, before they are placed."""
        return list({id(buffer): buffer for _, buffer, _ in self._slots}.values())

    def finish(self, arguments: Sequence[str], saved: Iterable[Buffer] = ()) -> int:
        """Places the buffers, those in `saved` in the argument "saved"; returns the size of that. The program can then run.

        `arguments` are the names of the arguments in the order in which `run` gets them.
        """
        size = _in_a_row(saved)
        self.workspace = _side_by_side([buffer for buffer in self.buffers() if buffer.base is None], id(self))
        index = {base: number for number, base in enumerate(arguments)}
        steps = (native.struct("stoker_step") * len(self._steps))(*self._steps)
        slots = (native.struct("stoker_slot") * len(self._slots))(
            *((place, index[buffer.base or ""], buffer.offset + offset) for place, buffer, offset in self._slots)
        )
        self._program = native.struct("stoker_program")(steps, slots, len(steps), len(slots))
        self._arguments = (ctypes.c_int64 * len(arguments))()
        self._address = ctypes.addressof(self._arguments)
        self._pack = struct.Struct(f"{len(arguments)}q").pack_into  # a third of the time of an assignment
        self._slots = []
        return size

    def run(self, *values: int) -> None:
        """Runs it with these addresses and numbers."""
        with self._lock:  # backward may run in another thread than forward, which may be using the program again
            self._pack(self._arguments, 0, *values)
            native.call("stoker_run", self._program, self._address)

    def _operand(self, matrix: Matrix) -> Any:
        row_stride, column_stride = matrix.row_stride, matrix.column_stride
        if matrix.columns == 1 or column_stride == 1:
            row_stride, column_stride = row_stride if matrix.rows > 1 else matrix.columns, 1
        return native.struct("stoker_operand")(None, row_stride, column_stride, native.dtype_code(matrix.dtype))

    def _slot(self, call: Any, name: str, value: Matrix | str) -> None:
        place = ctypes.addressof(call) + getattr(type(call), name).offset
        buffer, offset = value.address if isinstance(value, Matrix) else (Buffer(base=value), 0)
        step = len(self._steps)
        first, _ = buffer.uses.get(id(self), (step, step))
        buffer.uses[id(self)] = first, step
        self._slots.append((place, buffer, offset))

    def _add(self, function: str, call: Any) -> None:
        self._steps.append((_address(function), ctypes.addressof(call)))
        self._alive.append(call)


_STRUCTS = {
    "stoker_layer_norm_forward": "stoker_layer_norm_call",
    "stoker_layer_norm_backward": "stoker_layer_norm_call",
    "stoker_activation_forward": "stoker_activation_call",
    "stoker_activation_backward": "stoker_activation_call",
    "stoker_attention_forward": "stoker_attention_call",
    "stoker_attention_backward": "stoker_attention_call",
    "stoker_column_sums": "stoker_column_sums_call",
    "stoker_embedding_lookup": "stoker_embedding_call",
    "stoker_embedding_scatter": "stoker_embedding_call",
    "stoker_blas_product": "stoker_blas_call",
    "stoker_add_rows": "stoker_rows_call",
    "stoker_scale_rows": "stoker_scale_call",
    "stoker_dequantize": "stoker_quantized_call",
}


def _in_a_row(buffers: Iterable[Buffer]) -> int:
    end = 0
    for buffer in buffers:
        buffer.base, buffer.offset = "saved", end
        end += -(-buffer.size // _LINE) * _LINE
    return end


def _side_by_side(buffers: list[Buffer], program: int) -> int:
    """Buffers whose uses do not overlap share memory: each gets the lowest place that is free from its first use to its last."""
    placed: list[Buffer] = []
    highest = 0
    for buffer in sorted(buffers, key=lambda one: one.uses[program]):
        first, _ = buffer.uses[program]
        taken = sorted((one.offset, one.offset + one.size) for one in placed if one.uses[program][1] >= first)
        place = 0
        for begin, end in taken:
            if begin - place >= buffer.size:
                break
            place = max(place, -(-end // _LINE) * _LINE)
        buffer.base, buffer.offset = "workspace", place
        placed.append(buffer)
        highest = max(highest, place + buffer.size)
    return highest


@functools.cache
def _address(function: str) -> int:
    handle = getattr(native.library(), function)
    return ctypes.cast(handle, ctypes.c_void_p).value or 0


@functools.cache
def _sgemm() -> int | None:
    """The address of MKL's sgemm_ in libtorch; None where torch was built without it, as on Arm."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        return ctypes.cast(library.sgemm_, ctypes.c_void_p).value
    except (OSError, AttributeError):
        return None


def native_products(kind: str, rows: int, columns: int, depth: int, dtype: torch.dtype) -> str:
    """The engine of a product inside a program, as `engines.choose`: one that native code can call."""
    return engines.choose(kind, rows, columns, depth, dtype, without=() if _calls_torch(dtype) else ("torch",))


@functools.cache
def _calls_torch(dtype: torch.dtype) -> bool:
    """Whether sgemm_ is there and gives what torch.mm gives. torch's product of bf16 numbers has no such function."""
    if dtype != torch.float32 or _sgemm() is None:
        return False
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(shape, generator=generator) for shape in ((33, 65), (65, 47)))
    out = torch.empty(33, 47)
    program = Program(1)
    program.multiply(
        [(Matrix.of_argument("a", 33, 65, a.dtype), Matrix.of_argument("b", 65, 47, b.dtype))],
        Matrix.of_argument("c", 33, 47, out.dtype), "torch",
    )  # fmt: skip
    program.finish(("a", "b", "c"))
    program.run(a.data_ptr(), b.data_ptr(), out.data_ptr())
    expected = torch.empty_like(out)
    products.multiply([(a, b)], expected, None, "torch")
    return torch.equal(out, expected)
