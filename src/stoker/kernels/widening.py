"""Frozen weights in few bits as operands of products: widened just before a product, into memory that the next one uses again.

An operator takes a list of matrices, whose rows are those of the weights: values in fp32 or bf16, or codes (uint8: two of 4 bits
in a byte, int8: one of 8 bits), and a list of scales. `codes_and_scales` makes both, and autograd keeps them for backward, so
that no widened weight outlives its product.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from stoker.kernels.quantized import QuantizedWeight, dequantize_into, scale_count
from stoker.kernels.registry import check_tensor

__all__ = ["Weight", "check_weight", "codes_and_scales", "columns", "widened"]

Weight = Tensor | QuantizedWeight
"""What a linear layer multiplies with."""

_BITS = {torch.uint8: 4, torch.int8: 8}


def codes_and_scales(weights: Sequence[Weight]) -> tuple[list[Tensor], list[Tensor]]:
    """`weights` as operators take them. The scales of values are empty; if no weight has codes, there are no scales at all."""
    scales = [weight.scales if isinstance(weight, QuantizedWeight) else torch.empty(0) for weight in weights]
    quantized = any(isinstance(weight, QuantizedWeight) for weight in weights)
    return [_matrix(weight) for weight in weights], scales if quantized else []


def _matrix(weight: Weight) -> Tensor:
    if isinstance(weight, Tensor):
        return weight
    rows, width = weight.shape
    if weight.bits == 4 and width % 2:
        raise ValueError(f"linear: a weight in 4 bits has {width} columns; their number must be even")
    return weight.codes.view(rows, width * weight.bits // 8)


def columns(matrix: Tensor) -> int:
    """The columns of the weight that this matrix of values or codes stands for."""
    return int(matrix.shape[1]) * 8 // _BITS.get(matrix.dtype, 8)


def check_weight(operator: str, matrix: Tensor, scales: Tensor | None, features: int) -> None:
    """Raises ValueError unless this is a weight (rows, features), in values or in codes with their scales."""
    bits = _BITS.get(matrix.dtype)
    if bits is None:
        check_tensor(operator, "weight", matrix, shape=(None, features))
        return
    check_tensor(operator, "weight", matrix, shape=(None, features * bits // 8), dtypes=[matrix.dtype])
    if scales is None or not matrix.is_contiguous() or not scales.is_contiguous():
        raise ValueError(f"{operator}: a weight in {bits} bits needs scales; both must be contiguous")
    count = scale_count(matrix.shape[0], features, bits)
    check_tensor(operator, "scales", scales, shape=(count,), dtypes=[torch.float32])


class _Scratch(threading.local):
    """Memory for widened weights: a buffer for each thread, as large as its largest product needs."""

    buffer: Tensor | None = None

    def take(self, elements: int, dtype: torch.dtype) -> Tensor:
        size = elements * dtype.itemsize
        if self.buffer is None or self.buffer.numel() < size:
            self.buffer = None  # freed before the larger one is allocated
            self.buffer = torch.empty(size, dtype=torch.uint8)
        return self.buffer[:size].view(dtype)


_SCRATCH = _Scratch()


def widened(matrices: Sequence[Tensor], scales: Sequence[Tensor], dtype: torch.dtype, engine: str) -> list[Tensor]:
    """The weights for one product with an input of type `dtype`. The next call in this thread overwrites what it widened.

    `scales` may end before `matrices` do, where only values follow. torch's engine needs matrices of the input's type. Stoker's
    own widens bf16 as it packs, so only codes are widened for it, to fp32.
    """
    target = dtype if engine == "torch" else torch.float32
    narrow = [m.dtype in _BITS or (engine == "torch" and m.dtype != dtype) for m in matrices]
    if not any(narrow):
        return list(matrices)
    sizes = [m.shape[0] * columns(m) if small else 0 for m, small in zip(matrices, narrow, strict=True)]
    parts = _SCRATCH.take(sum(sizes), target).split(sizes)
    return [
        _widen(m, scales[i] if i < len(scales) else None, parts[i].view(m.shape[0], columns(m))) if narrow[i] else m
        for i, m in enumerate(matrices)
    ]


def _widen(matrix: Tensor, scales: Tensor | None, values: Tensor) -> Tensor:
    if (bits := _BITS.get(matrix.dtype)) is None:
        return values.copy_(matrix)
    assert scales is not None
    dequantize_into(values, matrix, scales, bits)
    return values
