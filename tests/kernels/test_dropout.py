"""Dropout keeps its rate, its scale and its independence, and follows torch's seed."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.plain import DTYPES, assert_near, random_cases
from stoker.kernels.dropout import dropout
from stoker.kernels.norm import dropout_add_layer_norm

ROWS, COLUMNS = 1024, 1000  # a million decisions
SIGMAS = 5.0  # one false alarm in two million checks


def kept(rows: int = ROWS, columns: int = COLUMNS, p: float = 0.5, seed: int | None = None) -> torch.Tensor:
    """+1 where an element was kept and -1 where it was dropped."""
    if seed is not None:
        torch.manual_seed(seed)
    return (dropout(torch.ones(rows, columns), p) != 0).float() * 2 - 1


def assert_uncorrelated(a: torch.Tensor, b: torch.Tensor) -> None:
    """Products of independent signs average to 0 within SIGMAS / sqrt(n)."""
    assert abs((a * b).mean().item()) < SIGMAS / math.sqrt(a.numel())


@pytest.mark.parametrize("p", [0.01, 0.1, 0.25, 0.5, 0.9, 0.999])
def test_rate_is_p_rounded_to_16_bits_and_the_scale_undoes_it(p):
    rate = round(p * 65536) / 65536
    y = dropout(torch.ones(ROWS, COLUMNS), p)
    dropped = (y == 0).float().mean().item()
    assert abs(dropped - rate) < SIGMAS * math.sqrt(rate * (1 - rate) / y.numel())
    survivors = y[y != 0]
    assert torch.equal(survivors, torch.full_like(survivors, survivors[0].item()))
    assert survivors[0].item() == pytest.approx(1 / (1 - rate), rel=1e-6)
    assert abs(rate - p) <= 1 / 131072


def test_rate_holds_in_every_row_and_column():
    mask = kept(p=0.1)
    for dim, n in ((0, ROWS), (1, COLUMNS)):
        rates = (mask < 0).float().mean(dim)
        assert (rates - 0.1).abs().max() < 6 * math.sqrt(0.09 / n)


def test_neighbours_are_independent():
    mask = kept()
    for shift in (1, 2, 7, 8, 16, 32, 64, 128, 512):
        assert_uncorrelated(mask[:, shift:], mask[:, :-shift])
        assert_uncorrelated(mask[shift:], mask[:-shift])
    assert_uncorrelated(mask[1:, 1:], mask[:-1, :-1])


def test_pairs_of_rows_and_of_columns_are_independent():
    """All pairs at once: the largest of half a million correlations is near 6 sigma only by a fault."""
    mask = kept()
    for signs in (mask, mask.t()):
        products = signs @ signs.t() / signs.shape[1]
        products.fill_diagonal_(0)
        assert products.abs().max() < 6.5 / math.sqrt(signs.shape[1])


def test_runs_have_the_lengths_of_a_fair_coin():
    """Along a row, half of the runs are of length 1, a quarter of length 2, ..."""
    flat = kept(64, 10_000).reshape(-1)
    changes = (flat[1:] != flat[:-1]).float()
    assert abs(changes.mean().item() - 0.5) < SIGMAS * 0.5 / math.sqrt(changes.numel())
    assert_uncorrelated(changes[1:] * 2 - 1, changes[:-1] * 2 - 1)


def test_layers_and_steps_are_independent():
    torch.manual_seed(0)
    calls = [kept(256, 500) for _ in range(8)]
    for i, a in enumerate(calls):
        for b in calls[i + 1 :]:
            assert_uncorrelated(a, b)
    assert_uncorrelated(kept(seed=1), kept(seed=2))


def test_operators_with_dropout_draw_a_key_each():
    torch.manual_seed(0)
    x, weight = torch.ones(64, 500), torch.ones(500)
    first = dropout_add_layer_norm(x, None, weight, p=0.5)
    second = dropout_add_layer_norm(x, None, weight, p=0.5)
    assert_uncorrelated(first.sign(), second.sign())


def test_mask_follows_the_seed_and_the_generator_state():
    first = kept(8, 100, seed=7)
    state = torch.get_rng_state()
    second = kept(8, 100)
    assert not torch.equal(first, second)
    torch.set_rng_state(state)
    assert torch.equal(kept(8, 100), second)
    assert torch.equal(kept(8, 100, seed=7), first)
    assert not torch.equal(kept(8, 100, seed=8), first)


def test_mask_of_an_element_depends_on_its_row_and_column_only():
    """Not on how many rows or columns there are around it."""
    large, small = kept(40, 300, seed=3), kept(17, 131, seed=3)
    assert torch.equal(large[:17, :131], small)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (0, 5), (5, 0), (3, 7), (2, 3, 129)], ids=str)
def test_gradient_uses_the_mask_of_the_value(shape, dtype):
    x = torch.randn(shape).to(dtype).requires_grad_()
    y = dropout(x, 0.4)
    grad = torch.randn(shape).to(dtype)
    y.backward(grad)
    factors = torch.where(y == 0, 0.0, 1 / (1 - round(0.4 * 65536) / 65536))
    assert_near(y, x.detach() * factors, 1e-2 if dtype == torch.bfloat16 else 1e-6)
    assert_near(x.grad, grad * factors, 1e-2 if dtype == torch.bfloat16 else 1e-6)


@random_cases(100)
@given(rows=st.integers(0, 60), columns=st.integers(0, 300), p=st.floats(0, 1), dtype=st.sampled_from(DTYPES))
def test_random_shapes_and_rates(rows, columns, p, dtype):
    x = torch.ones(rows, columns, dtype=dtype, requires_grad=True)
    y = dropout(x, p)
    y.backward(torch.ones_like(y))
    assert torch.equal(x.grad, y.detach())
    assert y.unique().numel() <= 2


def test_edges():
    x = torch.randn(4, 50)
    assert dropout(x, 0.0) is x
    assert dropout(x, 0.5, training=False) is x
    assert not dropout(x, 1.0).any()
    bad = torch.tensor([[float("inf"), float("-inf"), float("nan")] * 30])
    y = dropout(bad, 0.5)
    assert y.isnan().any()
    assert y.isinf().any()  # kept as it was; a dropped infinity is NaN, as 0 * inf is in torch's own


@pytest.mark.parametrize(
    ("x", "p", "words"),
    [
        (torch.ones(2), 1.1, "p is 1.1"),
        (torch.ones(2), -0.1, "p is -0.1"),
        (torch.ones(2, dtype=torch.float16), 0.5, "x has dtype float16"),
        (torch.ones(2, device="meta"), 0.5, "x is on meta"),
        (torch.eye(2).to_sparse(), 0.5, "layout"),
    ],
)
def test_wrong_arguments_are_named(x, p, words):
    with pytest.raises(ValueError, match=words):
        dropout(x, p)
