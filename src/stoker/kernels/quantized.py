"""Frozen weights of linear layers in 4 or 8 bits, and back.

    4 bits: w_i = level[code_i] * scale[i / 64]     NF4 of QLoRA: 16 levels, a scale for each 64 elements of the flat weight
    8 bits: w_ij = code_ij * scale[i] / 127         a scale for each row

A scale is the largest absolute value among its elements, in fp32. A weight takes 4.5 bits per element, or 8 and four bytes per
row. The 4-bit layout is that of bitsandbytes, so its weights are read without converting them. No gradient: such a weight is
frozen. How linear layers multiply with such weights: kernels/widening.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stoker.kernels import native
from stoker.kernels.registry import check_device, check_tensor, define

__all__ = ["QuantizedWeight", "dequantize", "dequantize_into", "quantize", "read_params4bit", "scale_count"]

BLOCK = 64


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight as `quantize` stores it."""

    codes: Tensor
    """bits=4: uint8, two codes in a byte, the first in its upper half; bits=8: int8 of `shape`"""
    scales: Tensor
    """fp32, one for each block of 64 elements or for each row"""
    shape: tuple[int, int]
    bits: int

    @property
    def nbytes(self) -> int:
        return int(self.codes.nbytes + self.scales.nbytes)


def quantize(weight: Tensor, bits: int = 4) -> QuantizedWeight:
    """`weight` (rows, columns) in fp32 or bf16, rounded to the nearest of what `bits` bits can express: 4 or 8."""
    check_device("quantize", weight=weight)
    rows, columns = weight.shape if weight.dim() == 2 else (0, 0)
    codes, scales = _quantize(weight.detach(), bits)
    return QuantizedWeight(codes, scales, (rows, columns), bits)


def dequantize(weight: QuantizedWeight, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values of `weight` (rows, columns) in fp32 or bf16."""
    check_device("dequantize", codes=weight.codes, scales=weight.scales)
    values: Tensor = _dequantize(weight.codes, weight.scales, *weight.shape, weight.bits, dtype)
    return values


def read_params4bit(weight: Any) -> QuantizedWeight | None:
    """The codes of a Params4bit of bitsandbytes, which is not imported; None if they are stored in any other way.

    That is FP4, blocks of another size, a weight that is not quantized yet, and the order that bitsandbytes uses for
    inference on CPUs with AVX512-BF16. The codes are shared, not copied. Scales that are quantized too become fp32.
    """
    state = getattr(weight, "quant_state", None)
    if type(weight).__name__ != "Params4bit" or state is None:
        return None
    if state.quant_type != "nf4" or state.blocksize != BLOCK or getattr(state, "packing_format_for_cpu", False):
        return None
    codes = weight.data.as_subclass(Tensor)
    # (1, n) is a transposed weight
    if len(state.shape) != 2 or codes.device.type != "cpu" or not codes.is_contiguous() or codes.shape[0] == 1:
        return None
    rows, columns = state.shape
    scales = _flat_scales(state) if state.nested else state.absmax
    return QuantizedWeight(codes.view(-1).view(torch.uint8), scales.float(), (rows, columns), 4)


def _flat_scales(state: Any) -> Tensor:
    """Scales that bitsandbytes has quantized too, in fp32. They are kept in `state`, because layers read them in every pass."""
    known: tuple[Tensor, Tensor] | None = getattr(state, "stoker_scales", None)
    if known is None or known[0] is not state.absmax:
        inner = state.state2
        steps = inner.absmax.repeat_interleave(inner.blocksize)[: state.absmax.numel()]
        known = state.absmax, inner.code[state.absmax.long()] * steps + state.offset
        state.stoker_scales = known
    return known[1]


def dequantize_into(values: Tensor, codes: Tensor, scales: Tensor, bits: int) -> None:
    """Writes the values of a weight into `values` (rows, columns), without checks; all tensors are contiguous."""
    _call("stoker_dequantize", values, codes, scales, bits)


def scale_count(rows: int, columns: int, bits: int) -> int:
    return _sizes(rows, columns, bits)[2]


def _sizes(rows: int, columns: int, bits: int) -> tuple[tuple[int, ...], torch.dtype, int]:
    """Shape and type of the codes, and how many scales there are."""
    elements = rows * columns
    if bits == 4:
        return ((elements + 1) // 2,), torch.uint8, (elements + BLOCK - 1) // BLOCK
    return (rows, columns), torch.int8, rows


def _check_bits(operator: str, bits: int) -> None:
    if bits not in (4, 8):
        raise ValueError(f"{operator}: bits is {bits}; choose 4 or 8")


def _call(function: str, values: Tensor, codes: Tensor, scales: Tensor, bits: int) -> None:
    rows, columns = values.shape
    if values.numel():
        call = native.fill(
            "stoker_quantized_call", values=values, codes=codes, scales=scales, rows=rows, columns=columns, bits=bits,
            dtype=native.dtype_code(values.dtype),
        )  # fmt: skip
        native.call(function, call)


def _quantize_kernel(weight: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    _check_bits("quantize", bits)
    check_tensor("quantize", "weight", weight, shape=(None, None))
    if not bool(weight.isfinite().all()):
        raise ValueError("quantize: weight has elements that are infinite or NaN; they would spoil their whole block")
    weight = weight.contiguous()
    codes, scales = _quantize_fake(weight, bits)
    scales.zero_()  # of rows without columns
    _call("stoker_quantize", weight, codes, scales, bits)
    return codes, scales


def _quantize_fake(weight: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    shape, dtype, scales = _sizes(weight.shape[0], weight.shape[1], bits)
    return weight.new_empty(shape, dtype=dtype), weight.new_empty(scales, dtype=torch.float32)


def _dequantize_kernel(codes: Tensor, scales: Tensor, rows: int, columns: int, bits: int, dtype: torch.dtype) -> Tensor:
    _check_bits("dequantize", bits)
    shape, code_dtype, count = _sizes(rows, columns, bits)
    check_tensor("dequantize", "codes", codes, shape=shape, dtypes=[code_dtype])
    check_tensor("dequantize", "scales", scales, shape=(count,), dtypes=[torch.float32])
    if dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"dequantize: dtype is {dtype}; choose torch.float32 or torch.bfloat16")
    codes, scales = codes.contiguous(), scales.contiguous()
    values = _dequantize_fake(codes, scales, rows, columns, bits, dtype)
    _call("stoker_dequantize", values, codes, scales, bits)
    return values


def _dequantize_fake(codes: Tensor, scales: Tensor, rows: int, columns: int, bits: int, dtype: torch.dtype) -> Tensor:
    return scales.new_empty(rows, columns, dtype=dtype)


_quantize = define("quantize(Tensor weight, int bits) -> (Tensor, Tensor)", _quantize_kernel, _quantize_fake)
_dequantize = define(
    "dequantize(Tensor codes, Tensor scales, int rows, int columns, int bits, ScalarType dtype) -> Tensor",
    _dequantize_kernel,
    _dequantize_fake,
)
