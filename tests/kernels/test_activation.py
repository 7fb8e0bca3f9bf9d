"""Activations and their gated forms equal the plain formula, to fp32 rounding and at the edges of the number line."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from kernels.plain import DTYPES, assert_near, check, leaf, random_cases
from stoker.kernels.activation import KINDS, bias_activation, gated, gated_activation

FORMULAS = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}
SHAPES = [(0, 8), (1, 1), (3, 7), (2, 3, 65), (130, 33), (4, 1030)]


def compare(shape, dtype, kind, bias, parameters=torch.float32):
    leaves = [leaf(*shape, dtype=dtype, scale=3.0), leaf(shape[-1], dtype=parameters, seed=1) if bias else None]
    act = FORMULAS[kind]
    check(lambda x, b: bias_activation(x, b, kind), lambda x, b: act(x if b is None else x + b), leaves)


def compare_gated(shape, dtype, kind, bias, order):
    leaves = [leaf(*shape, dtype=dtype, scale=2.0), leaf(shape[-1], seed=1) if bias else None]

    def formula(x, b):
        gate, up = (x if b is None else x + b).chunk(2, -1)
        if order == "up_first":
            gate, up = up, gate
        return FORMULAS[kind](gate) * up

    check(lambda x, b: gated_activation(x, b, kind, order), formula, leaves)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients_are_those_of_the_formula(shape, dtype, kind):
    compare(shape, dtype, kind, bias=True)
    compare(shape, dtype, kind, bias=False)


@pytest.mark.parametrize("order", ["gate_first", "up_first"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(0, 8), (1, 2), (2, 3, 66), (130, 34), (4, 2060)], ids=str)
def test_gated_values_and_gradients_are_those_of_the_formula(shape, dtype, kind, order):
    compare_gated(shape, dtype, kind, True, order)
    compare_gated(shape, dtype, kind, False, order)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gate_and_up_may_be_two_tensors(kind, dtype):
    leaves = [leaf(31, 70, dtype=dtype), leaf(31, 70, dtype=dtype, seed=1)]
    check(lambda g, u: gated(g, u, kind), lambda g, u: FORMULAS[kind](g) * u, leaves)


def test_bias_may_be_bf16():
    compare((33, 50), torch.bfloat16, "gelu", True, torch.bfloat16)
    compare((33, 50), torch.float32, "gelu", True, torch.bfloat16)


@random_cases(100)
@given(rows=st.integers(0, 150), width=st.integers(1, 700), kind=st.sampled_from(KINDS), dtype=st.sampled_from(DTYPES))
def test_random_shapes(rows, width, kind, dtype):
    compare((rows, width), dtype, kind, bias=True)


@random_cases(80)
@given(
    rows=st.integers(0, 150),
    half=st.integers(1, 600),
    kind=st.sampled_from(KINDS),
    dtype=st.sampled_from(DTYPES),
    order=st.sampled_from(["gate_first", "up_first"]),
)
def test_random_gated_shapes(rows, half, kind, dtype, order):
    compare_gated((rows, 2 * half), dtype, kind, True, order)


@pytest.mark.parametrize("kind", KINDS)
def test_the_error_is_near_fp32_rounding_everywhere(kind):
    """At most 3e-7 max(1, |x|) for the value and 5e-7 for the slope, 2 million points in [-30, 30]."""
    x = torch.linspace(-30, 30, 2_000_001).requires_grad_()
    wide = x.detach().double().requires_grad_()
    y, want = bias_activation(x, None, kind), FORMULAS[kind](wide)
    y.sum().backward()
    want.sum().backward()
    assert ((y - want).abs() / wide.abs().clamp_min(1)).max() < 3e-7
    assert (x.grad - wide.grad).abs().max() < 5e-7


def test_gelu_keeps_relative_accuracy_in_the_negative_tail():
    x = torch.linspace(-9, -0.1, 100_001)
    want = 0.5 * x.double() * torch.special.erfc(-x.double() / 2**0.5)  # torch's own GELU has cancelled to 0 there
    assert ((bias_activation(x, None, "gelu") - want).abs() / want.abs()).max() < 1e-5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_extreme_values_give_the_results_of_torch(kind, dtype):
    """Compared with fp64: torch's fp32 GELU by tanh gives NaN for the slope at 1e30, which is 1."""
    inf = float("inf")
    values = [-inf, inf, float("nan"), -1e30, 1e30, -3e38, 3e38, -1e15, 1e15, -100.0, 100.0, 0.0, -0.0, 1e-30, -1e-30]
    x = torch.tensor(values * 3).to(dtype).requires_grad_()
    wide = x.detach().double().requires_grad_()
    bias_activation(x, None, kind).sum().backward()
    FORMULAS[kind](wide).sum().backward()
    assert_near(
        bias_activation(x, None, kind), FORMULAS[kind](wide).to(dtype), 1e-2 if dtype == torch.bfloat16 else 1e-6
    )
    assert_near(x.grad, wide.grad.to(dtype), 1e-2 if dtype == torch.bfloat16 else 1e-6)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: bias_activation(torch.ones(2, 8), torch.ones(7)), r"bias has shape \(7,\)"),
        (lambda: bias_activation(torch.ones(2, 8, dtype=torch.float16)), "x has dtype float16"),
        (lambda: bias_activation(torch.ones(2, 8), kind="mish"), "kind is 'mish'"),
        (lambda: bias_activation(torch.ones(2, 8, device="meta")), "x is on meta"),
        (lambda: gated_activation(torch.ones(2, 7)), "two equal halves"),
        (lambda: gated_activation(torch.ones(2, 8), order="up"), "order is 'up'"),
        (lambda: gated(torch.ones(2, 8), torch.ones(2, 7)), r"up has shape \(2, 7\)"),
    ],
)
def test_wrong_arguments_are_named(call, words):
    with pytest.raises(ValueError, match=words):
        call()
