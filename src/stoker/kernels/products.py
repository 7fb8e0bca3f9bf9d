"""Matrix products by one of three engines: torch.mm (MKL, oneDNN), and Stoker's loops over cache (csrc/kernels/linear.cpp), which
multiply by their own register tiles ("stoker") or by oneDNN's microkernels ("onednn").

`multiply` runs one product by a named engine. Which engine to name is decided in kernels/engines.py; what the products mean,
and their gradients, in kernels/linear.py.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stoker.kernels import microkernels, native
from stoker.kernels.microkernels import Microkernel

__all__ = ["ENGINES", "available", "column_sums", "multiply", "multiply_native"]

ENGINES = ("torch", "stoker", "onednn")


def available(dtype: torch.dtype, result: torch.dtype) -> tuple[str, ...]:
    """The engines that multiply activations of `dtype` well on this machine, with a result of that type."""
    without = set() if microkernels.find(dtype) else {"onednn"}
    # Without units torch multiplies bf16 one number at a time, and it has no bf16 product with an fp32 result.
    if dtype == torch.bfloat16 and (result != dtype or not microkernels.torch_has_bf16_units()):
        without.add("torch")
    return tuple(engine for engine in ENGINES if engine not in without)


def multiply(
    terms: Sequence[tuple[Tensor, Tensor]],
    out: Tensor,
    bias: Tensor | None,
    engine: str,
    *,
    accumulate: bool = False,
) -> None:
    """out = sum of a @ b over `terms`, plus `bias` on every row, in place. Sums are fp32 whatever the storage.

    With `accumulate` the result is added to what `out` holds; give no bias then.
    """
    if engine == "torch":
        _multiply_torch(terms, out, bias, accumulate)
        return
    kernel = microkernels.find(terms[0][0].dtype) if engine == "onednn" else None
    if engine == "onednn" and kernel is None:
        raise ValueError(f"linear: engine is 'onednn', which cannot multiply {terms[0][0].dtype} on this machine")
    multiply_native(terms, out, bias, kernel, accumulate=accumulate)


def column_sums(x: Tensor) -> Tensor:
    """The sum of each column of `x` (rows, columns), in fp32, in an order that does not depend on the thread count."""
    if x.stride(1) != 1:
        x = x.contiguous()
    sums = torch.empty(x.shape[1], dtype=torch.float32)
    call = native.fill(
        "stoker_column_sums_call", x=x, sums=sums, row_stride=x.stride(0), rows=x.shape[0], columns=x.shape[1],
        dtype=native.dtype_code(x.dtype), sums_dtype=native.dtype_code(sums.dtype),
    )  # fmt: skip
    native.call("stoker_column_sums", call)
    return sums


def _multiply_torch(terms: Sequence[tuple[Tensor, Tensor]], out: Tensor, bias: Tensor | None, accumulate: bool) -> None:
    # The left operand is an activation or its gradient, and its type counts, as the result's does: fp32 weights are rounded
    # to bf16 for bf16 activations (this engine is for CPUs with bf16 units), but fp32 activations are never rounded.
    dtype = terms[0][0].dtype
    cast = [(a.to(dtype), b.to(dtype)) for a, b in terms]
    if dtype == torch.bfloat16 and out.dtype == torch.float32:
        dtype = torch.float32  # torch would round the sum to bf16
        cast = [(a.to(dtype), b.to(dtype)) for a, b in cast]
    elif dtype == torch.bfloat16 and len(cast) > 1:  # one product: torch would round after each term
        lefts, rights = zip(*cast, strict=True)
        cast = [(torch.cat(lefts, 1), torch.cat(rights, 0))]
    target = out if out.dtype == dtype else torch.empty(out.shape, dtype=dtype)
    if bias is not None:
        torch.addmm(bias.to(dtype), *cast.pop(0), out=target)
    elif target is not out or not accumulate:
        torch.mm(*cast.pop(0), out=target)
    for a, b in cast:
        target.addmm_(a, b)
    if target is not out:
        (out.add_ if accumulate else out.copy_)(target)


def _operand(tensor: Tensor) -> Any:
    """`tensor`, whose rows or columns are dense; the stride of a dimension of size one is made that of a dense matrix."""
    rows, columns = tensor.shape
    row_stride, column_stride = tensor.stride()
    if columns == 1 or column_stride == 1:
        row_stride, column_stride = row_stride if rows > 1 else columns, 1
    else:
        row_stride, column_stride = 1, column_stride
    return native.struct("stoker_operand")(
        tensor.data_ptr(), row_stride, column_stride, native.dtype_code(tensor.dtype)
    )


def _dense(tensor: Tensor) -> Tensor:
    """`tensor` itself if its rows or its columns are dense and do not overlap, else a copy."""
    rows, columns = tensor.shape
    row_stride, column_stride = tensor.stride()
    by_rows = (columns == 1 or column_stride == 1) and (rows == 1 or row_stride >= columns)
    by_columns = columns > 1 and column_stride > 1 and (rows == 1 or row_stride == 1) and column_stride >= rows
    return tensor if by_rows or by_columns else tensor.clone(memory_format=torch.contiguous_format)


def multiply_native(
    terms: Sequence[tuple[Tensor, Tensor]],
    out: Tensor,
    bias: Tensor | None,
    kernel: Microkernel | None,
    *,
    accumulate: bool = False,
) -> None:
    """`multiply` by Stoker's loops: by `kernel`, which needs all left operands of its type, or by register tiles."""
    left = [_dense(a) for a, _ in terms]
    right = [_dense(b) for _, b in terms]
    operands = native.struct("stoker_operand") * len(left)
    depths = (ctypes.c_int64 * len(left))(*(t.shape[1] for t in left))
    if bias is not None:
        bias = bias.contiguous()
    call = native.struct("stoker_product_call")(
        a=operands(*map(_operand, left)),
        b=operands(*map(_operand, right)),
        depths=ctypes.addressof(depths),
        c=out.data_ptr(),
        bias=native.pointer(bias),
        microkernel=kernel.multiply if kernel else None,
        release=kernel.release if kernel else None,
        terms=len(left),
        rows=out.shape[0],
        columns=out.shape[1],
        c_stride=out.stride(0),
        c_dtype=native.dtype_code(out.dtype),
        bias_dtype=native.parameter(bias),
        accumulate=int(accumulate),
        threads=native.threads(),
    )
    native.call("stoker_product", call)
