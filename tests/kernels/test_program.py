"""A program runs its kernels in order on the memory it was given, and multiplies as the engines do."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from stoker.kernels import native, products
from stoker.kernels.program import Matrix, Program, Workspace

pytestmark = pytest.mark.usefixtures("every_engine")


def argument(name: str, tensor: Tensor) -> Matrix:
    return Matrix.of_argument(name, *tensor.shape, tensor.dtype, tensor.stride())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("engine", products.ENGINES)
@pytest.mark.parametrize("kind", ["nt", "nn", "tn"])
def test_products_are_bit_for_bit_those_of_the_engine(kind: str, engine: str, dtype: torch.dtype) -> None:
    if engine == "torch" and dtype == torch.bfloat16:
        pytest.skip("torch's product of bf16 numbers is no function of C")
    generator = torch.Generator().manual_seed(0)
    rows, columns, depth = 300, 130, 70
    a = torch.randn((depth, rows) if kind == "tn" else (rows, depth), generator=generator).to(dtype)
    b = torch.randn((columns, depth) if kind == "nt" else (depth, columns), generator=generator).to(dtype)
    bias = torch.randn(columns, generator=generator)
    left, right = a.t() if kind == "tn" else a, b.t() if kind == "nt" else b
    expected, found = torch.empty(rows, columns, dtype=dtype), torch.empty(rows, columns, dtype=dtype)
    products.multiply([(left, right)], expected, bias, engine)
    program = Program(native.threads())
    program.multiply([(argument("a", left), argument("b", right))], argument("c", found), engine, "bias")
    program.finish(("a", "b", "c", "bias"))
    program.run(*[one.data_ptr() for one in (a, b, found, bias)])
    assert torch.equal(found, expected)


def test_several_terms_are_added() -> None:
    a, b, c, d = (torch.randint(-4, 5, (40, 40), generator=torch.Generator().manual_seed(n)).float() for n in range(4))
    for engine in products.ENGINES:
        out = torch.empty(40, 40)
        program = Program(2)
        terms = [(argument("a", a), argument("b", b)), (argument("c", c), argument("d", d))]
        program.multiply(terms, argument("out", out), engine)
        program.finish(("a", "b", "c", "d", "out"))
        program.run(*[one.data_ptr() for one in (a, b, c, d, out)])
        assert torch.equal(out, a @ b + c @ d)


def add(program: Program, x: Matrix, y: Matrix, z: Matrix) -> Matrix:
    program.call(
        "stoker_add_rows", x=x, y=y, z=z, x_stride=x.row_stride, y_stride=y.row_stride, z_stride=z.row_stride, rows=z.rows,
        columns=z.columns, dtype=native.dtype_code(x.dtype), y_dtype=native.dtype_code(y.dtype),
    )  # fmt: skip
    return z


def test_buffers_share_memory_once_they_are_no_longer_read() -> None:
    x, y = torch.randn(5, 32), torch.empty(5, 32)
    program = Program(1)
    value = argument("x", x)
    for _ in range(6):  # 2 x, 4 x, 8 x, ...: only two of them are needed at a time
        value = add(program, value, value, Matrix.in_workspace(5, 32, torch.float32))
    add(program, value, value, argument("y", y))
    program.finish(("workspace", "x", "y"))
    assert program.workspace == 2 * x.numel() * 4
    workspace = Workspace()
    program.run(workspace.address(program.workspace), x.data_ptr(), y.data_ptr())
    assert torch.equal(y, 2**7 * x)


def test_a_kernel_that_fails_ends_the_program_with_its_error() -> None:
    x, out = torch.empty(1, 1), torch.empty(1, 1)
    program = Program(1)
    wide = Matrix.of_argument("x", 1, 2**40, torch.float32)
    program.multiply([(wide, wide.t())], argument("out", out), "torch")
    program.finish(("x", "out"))
    with pytest.raises(RuntimeError, match="run: the native kernel failed"):
        program.run(x.data_ptr(), out.data_ptr())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_added_copied_and_dropped_out_as_by_torch(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    wide, y = torch.randn(9, 75, generator=generator).to(dtype), torch.randn(9, 70, generator=generator).to(dtype)
    bias, key = torch.randn(70, generator=generator), torch.tensor([1234567])
    x = wide[:, 3:73]

    def rows(other: Tensor | None = None, p: float = 0.0) -> Tensor:
        z = torch.empty(9, 70, dtype=dtype)
        call = native.fill(
            "stoker_rows_call", x=x, y=other, z=z, x_stride=75, y_stride=70 if other is y else 0, z_stride=70, rows=9, columns=70,
            key=int(key), p=p, dtype=native.dtype_code(dtype), y_dtype=native.parameter(other),
        )  # fmt: skip
        native.call("stoker_add_rows", call)
        return z

    assert torch.equal(rows(), x)
    assert torch.equal(rows(y), x + y)
    assert torch.equal(rows(bias), x + bias.to(dtype))
    assert torch.equal(rows(p=0.3), torch.ops.stoker.dropout(x.contiguous(), 0.3, key))


@pytest.mark.parametrize(("given", "wanted"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_rows_are_converted_as_by_torch(given: torch.dtype, wanted: torch.dtype) -> None:
    y, z = torch.randn(9, 70, generator=torch.Generator().manual_seed(0)).to(given), torch.empty(9, 75, dtype=wanted)
    call = native.fill(
        "stoker_rows_call", y=y, z=z, y_stride=70, z_stride=75, rows=9, columns=70, dtype=native.dtype_code(wanted),
        y_dtype=native.dtype_code(given),
    )  # fmt: skip
    native.call("stoker_add_rows", call)
    assert torch.equal(z[:, :70], y.to(wanted))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("result", [torch.float32, torch.bfloat16])
def test_rows_are_scaled_and_converted_as_by_torch(dtype: torch.dtype, result: torch.dtype) -> None:
    wide = torch.randn(9, 75, generator=torch.Generator().manual_seed(0)).to(dtype)
    for x in (wide[:, 3:73], wide.t()):
        z = torch.empty(x.shape, dtype=result)
        call = native.fill(
            "stoker_scale_call", x=x, z=z, x_stride=x.stride(0), x_column=x.stride(1), z_stride=z.stride(0), rows=x.shape[0],
            columns=x.shape[1], factor=1.7, dtype=native.dtype_code(dtype), z_dtype=native.dtype_code(result),
        )  # fmt: skip
        native.call("stoker_scale_rows", call)
        assert torch.equal(z, (x.float() * 1.7).to(result))


@pytest.mark.parametrize("rows", [1, 37])
def test_products_of_a_single_column_are_those_of_torch(rows: int) -> None:
    """An adapter of rank 1. BLAS rounds a dense column otherwise than one that it computes as a row."""
    generator = torch.Generator().manual_seed(0)
    x, a, b = (torch.randn(shape, generator=generator) for shape in ((rows, 65), (1, 65), (65, 1)))
    for right in (a.t(), b):
        out, expected = torch.empty(rows, 1), torch.empty(rows, 1)
        program = Program(1)
        program.multiply([(argument("x", x), argument("right", right))], argument("out", out), "torch")
        program.finish(("x", "right", "out"))
        program.run(x.data_ptr(), right.data_ptr(), out.data_ptr())
        products.multiply([(x, right)], expected, None, "torch")
        assert torch.equal(out, expected)
