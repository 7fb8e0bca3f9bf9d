"""LayerNorm and RMSNorm, with and without the dropout and sum in front, equal the plain formula."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from kernels.plain import DTYPES, check, factors_of_next_call, leaf, random_cases
from stoker.kernels.norm import dropout_add_layer_norm, dropout_add_rms_norm, layer_norm, rms_norm

SHAPES = [(0, 8), (1, 1), (1, 7), (3, 64), (2, 3, 65), (130, 33), (5, 1000)]


def compare(
    shape, dtype, p=0.0, residual=True, x_bias=True, bias=True, keep=False, rms=False, parameters=torch.float32
):
    width = shape[-1]
    rows = torch.Size(shape).numel() // width
    factors = factors_of_next_call(rows, width, p).view(shape) if p else 1.0
    leaves = [
        leaf(*shape, dtype=dtype),
        leaf(*shape, dtype=dtype, seed=1) if residual else None,
        leaf(width, dtype=parameters, seed=2),
        leaf(width, dtype=parameters, seed=3) if bias and not rms else None,
        leaf(width, dtype=parameters, seed=4) if x_bias else None,
    ]
    eps = 1e-5

    def operator(x, r, w, b, c):
        if rms:
            return dropout_add_rms_norm(x, r, w, x_bias=c, p=p, eps=eps, return_sum=keep)
        return dropout_add_layer_norm(x, r, w, b, x_bias=c, p=p, eps=eps, return_sum=keep)

    def formula(x, r, w, b, c):
        z = (x if c is None else x + c) * factors
        z = z if r is None else r + z
        y = F.rms_norm(z, (width,), w, eps) if rms else F.layer_norm(z, (width,), w, b, eps)
        return (y, z) if keep else y

    # LayerNorm of few columns, or of few that are not dropped, divides by a small deviation, and the error is relative to that.
    few = width * (1 - p) <= 16
    check(operator, formula, leaves, tolerance=None if not few else 3e-2 if dtype == torch.bfloat16 else 1e-4)


@pytest.mark.parametrize("rms", [False, True], ids=["layer", "rms"])
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("keep", [False, True], ids=["", "sum"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients_are_those_of_the_formula(shape, dtype, keep, p, rms):
    compare(shape, dtype, p=p, keep=keep, rms=rms)


@pytest.mark.parametrize("rms", [False, True], ids=["layer", "rms"])
@pytest.mark.parametrize("parts", range(8))
def test_every_part_may_be_missing(parts, rms):
    compare(
        (9, 70), torch.float32, p=0.2, residual=bool(parts & 1), x_bias=bool(parts & 2), bias=bool(parts & 4), rms=rms
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parameters_may_be_bf16_and_get_bf16_gradients(dtype):
    compare((40, 96), dtype, p=0.1, parameters=torch.bfloat16)


@pytest.mark.parametrize("rms", [False, True], ids=["layer", "rms"])
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("trained", range(8))
def test_frozen_parameters_get_no_gradient_and_change_no_other(trained, p, rms):
    def gradients(trained: int):
        torch.manual_seed(7)
        x, residual = leaf(90, 70), leaf(90, 70, seed=1)
        weight, bias, x_bias = (leaf(70, seed=i).requires_grad_(bool(trained >> i & 1)) for i in range(3))
        if rms:
            y = dropout_add_rms_norm(x, residual, weight, x_bias=x_bias, p=p)
        else:
            y = dropout_add_layer_norm(x, residual, weight, bias, x_bias=x_bias, p=p)
        y.square().sum().backward()
        return x.grad, residual.grad, *([weight.grad, x_bias.grad] if rms else [weight.grad, bias.grad, x_bias.grad])

    wanted = [True, True, *([trained & 1, trained & 4] if rms else [trained & 1, trained & 2, trained & 4])]
    for got, want, some in zip(gradients(trained), gradients(7), wanted, strict=True):
        assert (got is None) == (not some)
        assert got is None or torch.equal(got, want)


@random_cases(150)
@given(
    rows=st.integers(0, 140),
    width=st.integers(17, 300),
    p=st.sampled_from([0.0, 0.1, 0.9]),
    parts=st.integers(0, 15),
    dtype=st.sampled_from(DTYPES),
    rms=st.booleans(),
)
def test_random_shapes(rows, width, p, parts, dtype, rms):
    compare((rows, width), dtype, p, bool(parts & 1), bool(parts & 2), bool(parts & 4), bool(parts & 8), rms)


def test_plain_norms_take_any_leading_dimensions():
    x, w, b = leaf(2, 3, 4, 50), leaf(50, seed=1), leaf(50, seed=2)
    check(lambda x, w, b: layer_norm(x, w, b, 1e-5), lambda x, w, b: F.layer_norm(x, (50,), w, b, 1e-5), [x, w, b])
    x, w = leaf(2, 3, 4, 50), leaf(50, seed=1)
    check(lambda x, w: rms_norm(x, w, 1e-6), lambda x, w: F.rms_norm(x, (50,), w, 1e-6), [x, w])


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_a_bad_value_spoils_its_own_row_only(value):
    x = torch.randn(4, 40)
    x[2, 5] = value
    for y in (layer_norm(x, torch.ones(40)), rms_norm(x, torch.ones(40))):
        assert y[[0, 1, 3]].isfinite().all()
    assert layer_norm(x, torch.ones(40))[2].isnan().all()


def test_large_values_and_offsets_do_not_cancel():
    x = torch.randn(6, 256, dtype=torch.float64)
    for scale, offset, tolerance in ((1e15, 0.0, 1e-6), (1.0, 4096.0, 1e-3)):
        shifted = (x * scale + offset).float()
        want = F.layer_norm(shifted.double(), (256,))
        assert (layer_norm(shifted, torch.ones(256)) - want).abs().max() < tolerance


@pytest.mark.parametrize("scale", [1e19, 1e30, 1e37])
def test_squares_beyond_the_range_of_fp32_do_not_matter(scale):
    """torch's own gives NaN here."""
    x = (torch.randn(3, 64) * scale).requires_grad_()
    wide = x.detach().double().requires_grad_()
    for norm, formula in ((layer_norm, F.layer_norm), (rms_norm, F.rms_norm)):
        y, want = norm(x, torch.ones(64)), formula(wide, (64,))
        assert (y - want).abs().max() < 1e-5


def test_a_constant_row_gives_the_bias_and_no_infinite_gradient():
    x = torch.full((3, 32), 7.0, requires_grad=True)
    bias = torch.randn(32)
    y = layer_norm(x, torch.ones(32), bias)
    y.sum().backward()
    assert torch.allclose(y, bias.expand(3, 32))
    assert x.grad.isfinite().all()


def test_without_training_nothing_is_dropped():
    x, r, w = torch.randn(5, 30), torch.randn(5, 30), torch.ones(30)
    got = dropout_add_layer_norm(x, r, w, p=0.9, training=False)
    assert torch.equal(got, dropout_add_layer_norm(x, r, w, p=0.0))


def test_mixed_inputs_meet_in_the_wider_type():
    x, r, w = leaf(5, 30, dtype=torch.bfloat16), leaf(5, 30, seed=1), torch.ones(30)
    y = dropout_add_layer_norm(x, r, w)
    y.sum().backward()
    assert y.dtype == torch.float32
    assert x.grad.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": torch.ones(2, 8, dtype=torch.float64)}, "x has dtype float64"),
        ({"x": torch.ones(2, 8, device="meta")}, "x is on meta"),
        ({"weight": torch.ones(7)}, r"weight has shape \(7,\)"),
        ({"bias": torch.ones(2, 8)}, r"bias has shape \(2, 8\)"),
        ({"residual": torch.ones(3, 8)}, r"residual has shape \(3, 8\)"),
        ({"x_bias": torch.ones(8, dtype=torch.int64)}, "x_bias has dtype int64"),
        ({"p": 1.5}, "p is 1.5"),
        ({"x": torch.ones(2, 0)}, "must not be empty"),
    ],
)
def test_wrong_arguments_are_named(change, words):
    arguments = {"x": torch.ones(2, 8), "residual": None, "weight": torch.ones(8), "bias": None} | change
    with pytest.raises(ValueError, match=words):
        dropout_add_layer_norm(**arguments)
