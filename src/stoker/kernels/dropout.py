"""Dropout.

    y = x * m / (1 - p),   m_ij = 1 with probability 1 - p, else 0
    dx = dy * m / (1 - p)

Nothing is saved but the key: m is a function of (key, row, column), computed again in backward (csrc/core/random.h). A
row is a position of all dimensions but the last. p is rounded to a multiple of 1/65536, and the scale follows the
rounded value, so the expectation is exact.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stoker.kernels import native
from stoker.kernels.registry import check_device, check_tensor, define, draw_key, key_value, split_rows

__all__ = ["apply_dropout", "check_probability", "dropout"]


def dropout(x: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
    """Zeroes each element of `x` with probability `p`, scales the others by 1 / (1 - p); `x` itself if not training."""
    check_probability("dropout", p)
    check_device("dropout", x=x)
    if not training or p == 0.0:
        return x
    result: Tensor = apply_dropout(x, p, draw_key())
    return result


def check_probability(operator: str, p: float) -> None:
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"{operator}: p is {p}; a probability from 0 to 1 is needed")


def _kernel(x: Tensor, p: float, key: Tensor) -> Tensor:
    check_tensor("dropout", "x", x)
    x = x.contiguous()
    y = torch.empty_like(x)
    rows, columns = split_rows(x)
    if x.numel():
        dtype = native.dtype_code(x.dtype)
        native.call(
            "stoker_dropout", x.data_ptr(), y.data_ptr(), rows, columns, p, key_value(key), dtype, native.threads()
        )
    return y


def _fake(x: Tensor, p: float, key: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.p, key = inputs
    ctx.save_for_backward(key)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    (key,) = ctx.saved_tensors
    return apply_dropout(grad, ctx.p, key), None, None


# With a key that the caller has drawn; a second call with the same key applies the same mask.
apply_dropout = define(
    "dropout(Tensor x, float p, Tensor key) -> Tensor", _kernel, _fake, backward=_backward, setup_context=_setup_context
)
