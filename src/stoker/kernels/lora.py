"""Linear layers with LoRA adapters, one or several weights on the same input.

    y_i = x W_i^T + b_i + sum over the adapters a of weight i of h_a B_a^T,   h_a = s_a dropout_a(x) A_a^T
    dh_a = s_a dy_i B_a,   dB_a = dy_i^T h_a,   dA_a = dh_a^T dropout_a(x)
    dx = sum of dy_i W_i + sum of dropout_a(dh_a A_a)

The A of all adapters without dropout multiply x as one matrix, and h B^T is one more term of the product with W, so that y is
written once. Saved for backward: h (tokens, sum of ranks), x if a weight or an A is trained, and the weights if x needs a
gradient. Dropout masks are computed again from their keys. Types, and weights in few bits, are as in kernels/linear.py; h has the
type of x.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stoker.kernels import linear
from stoker.kernels.dropout import apply_dropout, check_probability
from stoker.kernels.registry import check_device, check_tensor, define, draw_key
from stoker.kernels.widening import Weight, codes_and_scales

__all__ = ["Adapter", "lora_linear_packed"]

_NAME = "lora_linear"


@dataclass(frozen=True)
class Adapter:
    """One LoRA adapter of a linear layer."""

    a: Tensor
    """(rank, features of x)"""
    b: Tensor
    """(rows of the weight, rank)"""
    scaling: float = 1.0
    p: float = 0.0
    """Probability of the dropout in front of `a`; 0 where it is not training."""


def lora_linear_packed(
    x: Tensor,
    weights: Sequence[Weight],
    biases: Sequence[Tensor] | None,
    adapters: Sequence[Sequence[Adapter]],
    *,
    engine: str | None = None,
) -> Tensor:
    """The results of `linear` with each of `weights` and its adapters, side by side in the last dimension.

    `adapters` has one sequence for each weight, empty for a weight without any.
    """
    if len(adapters) != len(weights):
        raise ValueError(
            f"{_NAME}: {len(weights)} weights but {len(adapters)} sequences of adapters; give one for each"
        )
    owned = [(index, one) for index, several in enumerate(adapters) for one in several]
    if not owned:
        return linear.linear_packed(x, weights, biases, engine=engine)
    flat = linear.check_arguments(_NAME, x, weights, biases)
    for _, one in owned:
        check_device(_NAME, a=one.a, b=one.b)
        check_probability(_NAME, one.p)
    # the kernel rounds a smaller probability to zero
    still = [pair for pair in owned if pair[1].p * 65536.0 < 0.5]
    dropped = [pair for pair in owned if pair[1].p * 65536.0 >= 0.5]
    both = still + dropped
    matrices, scales = codes_and_scales(weights)
    outputs: tuple[Tensor, Tensor] = _lora_linear(
        flat, matrices, scales, list(biases or ()), [one.a for _, one in both], [one.b for _, one in both],
        [index for index, _ in both], [float(one.scaling) for _, one in both], [float(one.p) for _, one in both],
        [draw_key() for _ in dropped], engine or "",
    )  # fmt: skip
    y = outputs[0]
    return y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[-1])


def _check(x: Tensor, weights: list[Tensor], a: list[Tensor], b: list[Tensor], owners: list[int]) -> None:
    for one_a, one_b, owner in zip(a, b, owners, strict=True):
        check_tensor(_NAME, "a", one_a, shape=(None, x.shape[1]))
        check_tensor(_NAME, "b", one_b, shape=(weights[owner].shape[0], one_a.shape[0]))


Group = tuple[slice, float, Tensor | None]
"""Which adapters, the probability and the key of their dropout."""


def _groups(p: list[float], keys: list[Tensor]) -> list[Group]:
    """Adapters with the same input: those without a key, which come first, together, and each of the others alone."""
    still = len(p) - len(keys)
    together: list[Group] = [(slice(0, still), 0.0, None)] if still else []
    return together + [(slice(i, i + 1), p[i], key) for i, key in enumerate(keys, still)]


def _dropped(x: Tensor, p: float, key: Tensor | None) -> Tensor:
    return x if key is None else apply_dropout(x, p, key)  # type: ignore[no-any-return]


def _together(matrices: list[Tensor], dim: int) -> Tensor:
    return matrices[0] if len(matrices) == 1 else torch.cat(matrices, dim)


def _kernel(
    x: Tensor,
    weights: list[Tensor],
    scales: list[Tensor],
    biases: list[Tensor],
    a: list[Tensor],
    b: list[Tensor],
    owners: list[int],
    scalings: list[float],
    p: list[float],
    keys: list[Tensor],
    engine: str,
) -> tuple[Tensor, Tensor]:
    linear.check_shapes(_NAME, x, weights, scales, biases)
    _check(x, weights, a, b, owners)
    inner = [
        linear.packed_products(_dropped(x, rate, key), [_together(a[which], 0)], [], [], engine)
        for which, rate, key in _groups(p, keys)
    ]
    h = _together(inner, 1)
    terms: dict[int, list[tuple[Tensor, Tensor]]] = {}
    parts = h.split([matrix.shape[0] for matrix in a], dim=1)
    for part, matrix, owner, scaling in zip(parts, b, owners, scalings, strict=True):
        terms.setdefault(owner, []).append((part.mul_(scaling), matrix.t()))
    return linear.packed_products(x, weights, scales, biases, engine, terms), h


def _fake(
    x: Tensor, weights: list[Tensor], scales: list[Tensor], biases: list[Tensor], a: list[Tensor], *rest: Any
) -> tuple[Tensor, Tensor]:
    widths, ranks = ([matrix.shape[0] for matrix in matrices] for matrices in (weights, a))
    return x.new_empty(x.shape[0], sum(widths)), x.new_empty(x.shape[0], sum(ranks))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weights, scales, biases, a, b, ctx.owners, ctx.scalings, ctx.p, keys, engine = inputs
    linear.note_base(ctx, x, weights, biases, engine)
    ctx.mark_non_differentiable(output[1])
    ctx.scales = len(scales)
    ctx.ranks = [matrix.shape[0] for matrix in a]
    ctx.a_dtypes, ctx.b_dtypes = [matrix.dtype for matrix in a], [matrix.dtype for matrix in b]
    ctx.wants_a, ctx.wants_b = [matrix.requires_grad for matrix in a], [matrix.requires_grad for matrix in b]
    wants_x, wants_weights, _ = ctx.wants
    needed: tuple[tuple[list[Tensor], bool], ...] = (
        ([x], any(wants_weights) or any(ctx.wants_a)),
        ([output[1]], any(ctx.wants_b)),
        (weights, wants_x),
        (scales, wants_x),
        (a, wants_x),
        (b, wants_x or any(ctx.wants_a)),
        (keys, True),
    )
    saved = [tensors if wanted else [] for tensors, wanted in needed]
    ctx.counts = [len(tensors) for tensors in saved]
    ctx.save_for_backward(*(tensor for tensors in saved for tensor in tensors))


def _backward(ctx: Any, dy: Tensor, _: Any) -> tuple[Any, ...]:
    saved = iter(ctx.saved_tensors)
    xs, hs, weights, scales, a, b, keys = ([next(saved) for _ in range(count)] for count in ctx.counts)
    x = xs[0] if xs else None
    parts = linear.columns_of(ctx, dy)
    own = [parts[owner] for owner in ctx.owners]
    db: list[Tensor | None] = [None] * len(own)
    if hs:
        inner = hs[0].split(ctx.ranks, dim=1)
        for i, wanted in enumerate(ctx.wants_b):
            db[i] = linear.weight_gradient(own[i], inner[i], ctx.b_dtypes[i], ctx.engine) if wanted else None
    dh = [
        linear.input_gradient([part], [matrix], [], ctx.engine).mul_(scaling)
        for part, matrix, scaling in zip(own, b, ctx.scalings, strict=False)
    ]
    groups = _groups(ctx.p, keys)
    da = _a_gradients(ctx, groups, dh, x)
    dx = _input_gradient(ctx, groups, parts, dh, weights, scales, a) if ctx.wants[0] else None
    dweights, dbiases = linear.base_gradients(ctx, parts, x)
    return dx, dweights, [None] * ctx.scales, dbiases, da, db, None, None, None, [None] * len(keys), None


def _a_gradients(ctx: Any, groups: list[Group], dh: list[Tensor], x: Tensor | None) -> list[Tensor | None]:
    """dA of each adapter, None where it is not wanted. x is read once for all adapters of a group."""
    gradients: list[Tensor | None] = [None] * len(ctx.ranks)
    for which, rate, key in groups:
        wanted = [i for i in range(which.start, which.stop) if ctx.wants_a[i]]
        if not wanted or x is None:
            continue
        joined = _together([dh[i] for i in wanted], 1)
        made = linear.weight_gradient(joined, _dropped(x, rate, key), ctx.a_dtypes[wanted[0]], ctx.engine)
        for i, rows in zip(wanted, made.split([ctx.ranks[i] for i in wanted]), strict=True):
            # a copy, so that each gradient has its own memory: optimizers and collectives may change it in place
            gradients[i] = rows.to(ctx.a_dtypes[i], copy=len(wanted) > 1)
    return gradients


def _input_gradient(
    ctx: Any,
    groups: list[Group],
    parts: list[Tensor],
    dh: list[Tensor],
    weights: list[Tensor],
    scales: list[Tensor],
    a: list[Tensor],
) -> Tensor:
    joined = [(_together(dh[which], 1), _together(a[which], 0), rate, key) for which, rate, key in groups]
    still = [(left, right) for left, right, _, key in joined if key is None]
    lefts, rights = [*parts, *(left for left, _ in still)], [*weights, *(right for _, right in still)]
    dx: Tensor = linear.input_gradient(lefts, rights, scales, ctx.engine)
    for left, right, rate, key in joined:
        if key is not None:
            dx += _dropped(linear.input_gradient([left], [right], [], ctx.engine), rate, key)
    return dx


_lora_linear = define(
    "lora_linear(Tensor x, Tensor[] weights, Tensor[] scales, Tensor[] biases, Tensor[] a, Tensor[] b, int[] owners,"
    " float[] scalings, float[] p, Tensor[] keys, str engine) -> (Tensor, Tensor)",
    _kernel,
    _fake,
    backward=_backward,
    setup_context=_setup_context,
)
