"""How kernel tests compare: an operator on fp32 or bf16 leaves against a plain PyTorch formula on the same values in fp64.

`OPERATORS` names every elementwise operator with a small call of it, for the promises that all of them keep.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from hypothesis import settings
from torch import Tensor

from stoker.kernels.activation import bias_activation, gated, gated_activation
from stoker.kernels.dropout import dropout
from stoker.kernels.embedding import embedding, embedding_layer_norm_dropout
from stoker.kernels.lora import Adapter, lora_linear_packed
from stoker.kernels.loss import cross_entropy, linear_cross_entropy
from stoker.kernels.norm import dropout_add_layer_norm, dropout_add_rms_norm, layer_norm, rms_norm
from stoker.kernels.registry import draw_key, reference_factors

# Error allowed per element: this much of its own size, of the largest element, and of 1, the size of what goes in (sums
# cancel). bf16 keeps 8 bits, so rounding alone makes 2^-9; the rest is for sums of rounded gradients.
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 1e-2}
DTYPES = [torch.float32, torch.bfloat16]

# With STOKER_TEST_BRIEF the random cases are a tenth: the same tests run again for every other instruction set.
BRIEF = bool(os.environ.get("STOKER_TEST_BRIEF"))


def random_cases(count: int) -> settings:
    return settings(max_examples=max(5, count // 10) if BRIEF else count, deadline=None)


def assert_near(got: Tensor, want: Tensor, tolerance: float) -> None:
    assert got.shape == want.shape
    got, want = got.detach().double(), want.detach().double()
    if not want.numel():
        return
    finite = want.isfinite()
    assert torch.equal(got.isnan(), want.isnan())
    infinite = want.isinf()
    assert torch.equal(got[infinite], want[infinite])
    if not finite.any():
        return
    got, want = got[finite], want[finite]
    error = (got - want).abs() - tolerance * (want.abs() + want.abs().max() + 1)
    assert error.max() <= 0, f"off by {error.max().item()} more than allowed"


def leaf(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(hash((shape, seed)) % 2**31)
    return (scale * torch.randn(shape, generator=generator)).to(dtype).requires_grad_()


def check(
    operator: Callable[..., Tensor | tuple[Tensor, ...]],
    formula: Callable[..., Tensor | tuple[Tensor, ...]],
    leaves: Sequence[Tensor | None],
    tolerance: float | None = None,
) -> None:
    """Values and gradients of `operator(*leaves)` are those of `formula` on the same leaves in fp64."""
    wide = [None if x is None else x.detach().double().requires_grad_(x.requires_grad) for x in leaves]
    got, want = operator(*leaves), formula(*wide)
    got, want = (x if isinstance(x, tuple) else (x,) for x in (got, want))
    tolerance = tolerance or max(TOLERANCE[x.dtype] for x in [*leaves, *got] if x is not None)
    grads = [torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype) for y in got]
    torch.autograd.backward(got, grads)
    torch.autograd.backward(want, [grad.double() for grad in grads])
    for y, expected in zip(got, want, strict=True):
        assert_near(y, expected, tolerance)
    for x, expected in zip(leaves, wide, strict=True):
        if x is not None and x.requires_grad:
            assert x.grad is not None
            assert x.grad.dtype == x.dtype
            assert_near(x.grad, expected.grad, tolerance)


def factors_of_next_call(rows: int, columns: int, p: float, seed: int = 5) -> Tensor:
    """The dropout factors, in fp64, that the next operator call will use; sets torch's seed."""
    torch.manual_seed(seed)
    key = draw_key()
    torch.manual_seed(seed)
    return reference_factors(key, rows, columns, p).double()


@dataclass(frozen=True)
class Operator:
    """A call of an operator on `rows` rows: the tensors that want gradients, and what to do with them."""

    call: Callable[..., Tensor | tuple[Tensor, ...]]
    leaves: Callable[[int, torch.dtype], list[Tensor]]

    def run(self, rows: int, dtype: torch.dtype = torch.float32, seed: int = 3) -> list[Tensor]:
        """Outputs and gradients, after seeding torch."""
        leaves = self.leaves(rows, dtype)
        torch.manual_seed(seed)
        outputs = self.call(*leaves)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        torch.autograd.backward(
            outputs, [torch.cos(torch.arange(y.numel())).view(y.shape).to(y.dtype) for y in outputs]
        )
        return [y.detach() for y in outputs] + [x.grad for x in leaves]


WIDTH = 200  # not a multiple of any vector or of the 64 columns that share random numbers


def _rows(*widths: int) -> Callable[[int, torch.dtype], list[Tensor]]:
    return lambda rows, dtype: [leaf(rows, width, dtype=dtype, seed=i) for i, width in enumerate(widths)]


def _with_parameters(inputs: int, parameters: int) -> Callable[[int, torch.dtype], list[Tensor]]:
    return lambda rows, dtype: [
        *_rows(*[WIDTH] * inputs)(rows, dtype),
        *[leaf(WIDTH, seed=10 + i) for i in range(parameters)],
    ]


def _labels(rows: int, classes: int) -> Tensor:
    labels = torch.arange(rows) * 7 % classes
    labels[1::3] = -100
    return labels


def _ids(rows: int, size: int) -> Tensor:
    return torch.arange(rows) ** 2 % size


def _embed(word: Tensor, position: Tensor, kind: Tensor, weight: Tensor, bias: Tensor, rows: int) -> Tensor:
    ids, positions, kinds = _ids(rows, 50), torch.arange(rows) % 40, torch.arange(rows) % 2
    return embedding_layer_norm_dropout(
        ids, positions, kinds, word, position, kind, weight, bias, eps=1e-12, p=0.3, padding_idx=0
    )


def _adapted(x: Tensor, w: Tensor, v: Tensor, b: Tensor, c: Tensor, *adapters: Tensor) -> Tensor:
    """Two weights, the second with dropout in front of its adapter."""
    first, second = Adapter(*adapters[:2], scaling=2.0), Adapter(*adapters[2:], scaling=0.5, p=0.3)
    return lora_linear_packed(x, [w, v], [b, c], [[first], [second]], engine="stoker")


def operators(rows: int) -> dict[str, Operator]:
    """Every operator by name; `rows` is needed beforehand by those that take labels or ids."""

    def tables(_: int, dtype: torch.dtype) -> list[Tensor]:
        parameters = [leaf(WIDTH, seed=i) for i in range(2)]
        return [leaf(size, WIDTH, dtype=dtype, seed=size) for size in (50, 40, 2)] + parameters

    def head(n: int, dtype: torch.dtype) -> list[Tensor]:
        return [leaf(n, WIDTH, dtype=dtype), leaf(30, WIDTH, dtype=dtype, seed=1), leaf(30, seed=2)]

    def adapted(n: int, dtype: torch.dtype) -> list[Tensor]:
        shapes = ((n, WIDTH), (30, WIDTH), (20, WIDTH), (30,), (20,), (4, WIDTH), (30, 4), (3, WIDTH), (20, 3))
        return [leaf(*shape, dtype=dtype, seed=i) for i, shape in enumerate(shapes)]

    return {
        "dropout": Operator(lambda x: dropout(x, 0.3), _rows(WIDTH)),
        "layer_norm": Operator(lambda x, w, b: layer_norm(x, w, b), _with_parameters(1, 2)),
        "rms_norm": Operator(lambda x, w: rms_norm(x, w), _with_parameters(1, 1)),
        "dropout_add_layer_norm": Operator(
            lambda x, r, w, b, c: dropout_add_layer_norm(x, r, w, b, x_bias=c, p=0.3), _with_parameters(2, 3)
        ),
        "dropout_add_rms_norm": Operator(
            lambda x, r, w, c: dropout_add_rms_norm(x, r, w, x_bias=c, p=0.3, return_sum=True), _with_parameters(2, 2)
        ),
        "bias_activation": Operator(lambda x, b: bias_activation(x, b, "gelu"), _with_parameters(1, 1)),
        "gated_activation": Operator(lambda x, b: gated_activation(x, b, "silu"), _with_parameters(1, 1)),
        "gated": Operator(lambda g, u: gated(g, u, "gelu_tanh"), _rows(WIDTH, WIDTH)),
        "cross_entropy": Operator(lambda x: cross_entropy(x, _labels(rows, WIDTH), reduction="sum"), _rows(WIDTH)),
        "linear_cross_entropy": Operator(
            lambda x, w, b: linear_cross_entropy(x, w, b, _labels(rows, 30), reduction="sum"), head
        ),
        "lora_linear_packed": Operator(_adapted, adapted),
        "embedding": Operator(
            lambda table: embedding(_ids(rows, 50), table, padding_idx=0),
            lambda _, dtype: [leaf(50, WIDTH, dtype=dtype)],
        ),
        "embedding_layer_norm_dropout": Operator(lambda *leaves: _embed(*leaves, rows=rows), tables),
    }


NAMES = list(operators(1))
