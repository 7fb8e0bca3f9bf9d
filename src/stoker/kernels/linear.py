"""Linear layers, one or several weights on the same input.

    y = [x W_1^T + b_1, x W_2^T + b_2, ...]       side by side in one result
    dx = sum of dy_i W_i,   dW_i = dy_i^T x,   db_i = column sums of dy_i

Several weights are q, k and v: one pass over x and one result, while each stays the parameter it is. Saved for backward: x
if a weight is trained, and the weights if x needs a gradient. x may be bf16 while the weights are fp32 (master weights), and a
frozen weight may be stored in bf16 or in few bits (kernels/widening.py); sums are fp32, y has the type of x, gradients the type
of what they belong to.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stoker.kernels import engines, products
from stoker.kernels.quantized import QuantizedWeight
from stoker.kernels.registry import check_device, check_tensor, define
from stoker.kernels.widening import Weight, check_weight, codes_and_scales, columns, widened

__all__ = ["linear", "linear_packed"]


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None, *, engine: str | None = None) -> Tensor:
    """x @ weight.T + bias over the last dimension of `x`. `engine` forces "torch" or "stoker"."""
    return linear_packed(x, [weight], None if bias is None else [bias], engine=engine)


def linear_packed(
    x: Tensor, weights: Sequence[Weight], biases: Sequence[Tensor] | None = None, *, engine: str | None = None
) -> Tensor:
    """The results of `linear` with each of `weights`, side by side in the last dimension."""
    flat = check_arguments("linear", x, weights, biases)
    matrices, scales = codes_and_scales(weights)
    y: Tensor = _linear(flat, matrices, scales, list(biases or ()), engine or "")
    return y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[-1])


def check_arguments(operator: str, x: Tensor, weights: Sequence[Weight], biases: Sequence[Tensor] | None) -> Tensor:
    """`x` as a matrix, after what has to be checked before torch's dispatcher sees the call."""
    if biases and any(bias is None for bias in biases):
        raise ValueError(f"{operator}: one of the biases is None; give one for each weight or none")
    check_device(operator, x=x)
    for weight in weights:
        check_device(operator, weight=weight.codes if isinstance(weight, QuantizedWeight) else weight)
    for bias in biases or ():
        check_device(operator, bias=bias)
    if not x.dim():
        raise ValueError(f"{operator}: x has no dimension; it must be (..., features)")
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1]) if x.dim() != 2 else x


def check_shapes(operator: str, x: Tensor, weights: list[Tensor], scales: list[Tensor], biases: list[Tensor]) -> None:
    check_tensor(operator, "x", x, shape=(None, None))
    if not weights:
        raise ValueError(f"{operator}: no weight given")
    if biases and len(biases) != len(weights):
        raise ValueError(f"{operator}: {len(weights)} weights but {len(biases)} biases; give one for each or none")
    for index, weight in enumerate(weights):
        check_weight(operator, weight, scales[index] if scales else None, x.shape[1])
    for weight, bias in zip(weights, biases, strict=False):
        check_tensor(operator, "bias", bias, shape=(weight.shape[0],))


def packed_products(
    x: Tensor,
    weights: list[Tensor],
    scales: list[Tensor],
    biases: list[Tensor],
    engine: str,
    more: dict[int, list[tuple[Tensor, Tensor]]] | None = None,
) -> Tensor:
    """[x W_i^T + b_i] side by side, without checks. `more` has terms (p, q): p q is added to the result of that index."""
    y = torch.empty(x.shape[0], sum(weight.shape[0] for weight in weights), dtype=x.dtype)
    column = 0
    for index, weight in enumerate(weights):
        width = weight.shape[0]
        chosen = engines.choose("nt", x.shape[0], width, x.shape[1], x.dtype, engine)
        out = y[:, column : column + width]
        (values,) = widened([weight], scales[index : index + 1], x.dtype, chosen)
        terms = [(x, values.t()), *(more or {}).get(index, ())]
        products.multiply(terms, out, biases[index] if biases else None, chosen)
        column += width
    return y


def _kernel(x: Tensor, weights: list[Tensor], scales: list[Tensor], biases: list[Tensor], engine: str) -> Tensor:
    check_shapes("linear", x, weights, scales, biases)
    return packed_products(x, weights, scales, biases, engine)


def _fake(x: Tensor, weights: list[Tensor], scales: list[Tensor], biases: list[Tensor], engine: str) -> Tensor:
    return x.new_empty(x.shape[0], sum(weight.shape[0] for weight in weights))


def _input_gradient_kernel(parts: list[Tensor], weights: list[Tensor], scales: list[Tensor], engine: str) -> Tensor:
    for part, weight in zip(parts, weights, strict=True):
        check_tensor("linear", "the gradient", part, shape=(parts[0].shape[0], weight.shape[0]))
    dx = torch.empty(parts[0].shape[0], columns(weights[0]), dtype=parts[0].dtype)
    depth = sum(part.shape[1] for part in parts)
    chosen = engines.choose("nn", dx.shape[0], dx.shape[1], depth, dx.dtype, engine)
    values = widened(weights, scales, dx.dtype, chosen)
    products.multiply(list(zip(parts, values, strict=True)), dx, None, chosen)
    return dx


def _input_gradient_fake(parts: list[Tensor], weights: list[Tensor], scales: list[Tensor], engine: str) -> Tensor:
    return parts[0].new_empty(parts[0].shape[0], columns(weights[0]))


input_gradient = define(
    "linear_input_gradient(Tensor[] parts, Tensor[] weights, Tensor[] scales, str engine) -> Tensor",
    _input_gradient_kernel,
    _input_gradient_fake,
)


def _weight_gradient_kernel(dy: Tensor, x: Tensor, dtype: torch.dtype, engine: str) -> Tensor:
    gradient = torch.empty(dy.shape[1], x.shape[1], dtype=dtype)
    chosen = engines.choose("tn", dy.shape[1], x.shape[1], dy.shape[0], dy.dtype, engine)
    if dy.shape[0] == 0:
        return gradient.zero_()
    products.multiply([(dy.t(), x)], gradient, None, chosen)
    return gradient


def _weight_gradient_fake(dy: Tensor, x: Tensor, dtype: torch.dtype, engine: str) -> Tensor:
    return dy.new_empty(dy.shape[1], x.shape[1], dtype=dtype)


weight_gradient = define(
    "linear_weight_gradient(Tensor dy, Tensor x, ScalarType dtype, str engine) -> Tensor",
    _weight_gradient_kernel,
    _weight_gradient_fake,
)


def _bias_gradient_kernel(dy: Tensor, dtype: torch.dtype) -> Tensor:
    return products.column_sums(dy).to(dtype)


def _bias_gradient_fake(dy: Tensor, dtype: torch.dtype) -> Tensor:
    return dy.new_empty(dy.shape[1], dtype=dtype)


bias_gradient = define(
    "linear_bias_gradient(Tensor dy, ScalarType dtype) -> Tensor", _bias_gradient_kernel, _bias_gradient_fake
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weights, scales, biases, engine = inputs
    note_base(ctx, x, weights, biases, engine)
    ctx.scales = len(scales)
    ctx.save_for_backward(x if any(ctx.wants[1]) else None, *((*weights, *scales) if x.requires_grad else ()))


def note_base(ctx: Any, x: Tensor, weights: list[Tensor], biases: list[Tensor], engine: str) -> None:
    """What `columns_of` and `base_gradients` read in backward."""
    ctx.widths = [weight.shape[0] for weight in weights]
    ctx.weight_dtypes = [weight.dtype for weight in weights]
    ctx.bias_dtypes = [bias.dtype for bias in biases]
    ctx.engine = engine
    ctx.wants = (
        x.requires_grad,
        [weight.requires_grad for weight in weights],
        [bias.requires_grad for bias in biases],
    )


def _backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    x, *saved = ctx.saved_tensors
    weights, scales = saved[: len(ctx.widths)], saved[len(ctx.widths) :]
    parts = columns_of(ctx, dy)
    dx = input_gradient(parts, weights, scales, ctx.engine) if ctx.wants[0] else None
    dweights, dbiases = base_gradients(ctx, parts, x)
    return dx, dweights, [None] * ctx.scales, dbiases, None


def columns_of(ctx: Any, dy: Tensor) -> list[Tensor]:
    """The gradient of each weight's own result."""
    return list((dy if dy.stride(1) == 1 else dy.contiguous()).split(ctx.widths, dim=1))


def base_gradients(ctx: Any, parts: list[Tensor], x: Tensor | None) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """dW_i and db_i, None where `ctx.wants` wants none."""
    _, wants_weights, wants_biases = ctx.wants
    dweights = [
        weight_gradient(part, x, dtype, ctx.engine) if wanted else None
        for part, dtype, wanted in zip(parts, ctx.weight_dtypes, wants_weights, strict=True)
    ]
    dbiases = [
        bias_gradient(part, dtype) if wanted else None
        for part, dtype, wanted in zip(parts, ctx.bias_dtypes, wants_biases, strict=False)
    ]
    return dweights, dbiases


_linear = define(
    "linear(Tensor x, Tensor[] weights, Tensor[] scales, Tensor[] biases, str engine) -> Tensor",
    _kernel,
    _fake,
    backward=_backward,
    setup_context=_setup_context,
)
