"""Cross entropy, alone and with its linear layer, equals the plain formula."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from kernels.plain import DTYPES, assert_near, check, leaf, random_cases
from stoker.kernels import loss as module
from stoker.kernels.loss import REDUCTIONS, cross_entropy, linear_cross_entropy


def some_labels(rows: int, classes: int, ignored: float = 0.4, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (rows,), generator=generator)
    return labels.masked_fill(torch.rand(rows, generator=generator) < ignored, -100)


def compare(rows, classes, dtype, reduction, ignored=0.4, scale=3.0):
    labels = some_labels(rows, classes, ignored)
    check(
        lambda x: cross_entropy(x, labels, reduction=reduction),
        lambda x: F.cross_entropy(x, labels, reduction=reduction),
        [leaf(rows, classes, dtype=dtype, scale=scale)],
    )


def compare_linear(rows, hidden, classes, dtype, reduction, bias=True, weights=torch.float32, ignored=0.4):
    labels = some_labels(rows, classes, ignored)
    leaves = [
        leaf(rows, hidden, dtype=dtype),
        leaf(classes, hidden, dtype=weights, seed=1),
        leaf(classes, dtype=weights, seed=2) if bias else None,
    ]
    check(
        lambda x, w, b: linear_cross_entropy(x, w, b, labels, reduction=reduction),
        lambda x, w, b: F.cross_entropy(F.linear(x, w, b), labels, reduction=reduction),
        leaves,
    )


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "classes"), [(0, 5), (1, 1), (1, 2), (3, 513), (40, 1000), (2, 30522)])
def test_values_and_gradients_are_those_of_the_formula(rows, classes, dtype, reduction):
    compare(rows, classes, dtype, reduction)
    compare(rows, classes, dtype, reduction, ignored=0.0)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "hidden", "classes"), [(0, 4, 5), (1, 1, 1), (5, 16, 2), (37, 24, 1001)])
def test_the_fused_head_is_that_of_the_formula(rows, hidden, classes, dtype, reduction):
    compare_linear(rows, hidden, classes, dtype, reduction)
    compare_linear(rows, hidden, classes, dtype, reduction, bias=False, ignored=0.0)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_the_fused_head_works_through_several_blocks(monkeypatch, reduction):
    monkeypatch.setattr(module, "_BLOCK_BYTES", 4 * 50 * 7)  # seven rows of logits
    compare_linear(64, 20, 50, torch.float32, reduction)


def test_the_fused_head_takes_bf16_weights():
    compare_linear(30, 20, 50, torch.bfloat16, "mean", weights=torch.bfloat16)
    compare_linear(30, 20, 50, torch.float32, "sum", weights=torch.bfloat16)


@random_cases(80)
@given(
    rows=st.integers(0, 70),
    classes=st.integers(1, 600),
    dtype=st.sampled_from(DTYPES),
    reduction=st.sampled_from(REDUCTIONS),
    ignored=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_random_shapes(rows, classes, dtype, reduction, ignored):
    compare(rows, classes, dtype, reduction, ignored)


@random_cases(60)
@given(
    rows=st.integers(0, 50),
    hidden=st.integers(1, 40),
    classes=st.integers(1, 200),
    reduction=st.sampled_from(REDUCTIONS),
    ignored=st.sampled_from([0.0, 0.85, 1.0]),
    bias=st.booleans(),
)
def test_random_shapes_of_the_fused_head(rows, hidden, classes, reduction, ignored, bias):
    compare_linear(rows, hidden, classes, torch.float32, reduction, bias, ignored=ignored)


def test_leading_dimensions_and_another_ignore_index():
    x, labels = leaf(2, 3, 4, 10), torch.arange(24).view(2, 3, 4) % 10
    want = lambda x: F.cross_entropy(x.reshape(-1, 10), labels.reshape(-1), ignore_index=3)  # noqa: E731
    check(lambda x: cross_entropy(x, labels, ignore_index=3), want, [x])
    assert cross_entropy(x, labels, reduction="none").shape == labels.shape
    hidden, weight = leaf(2, 3, 4, 8), leaf(10, 8)
    got = linear_cross_entropy(hidden, weight, None, labels, ignore_index=3)
    assert_near(got, want(hidden @ weight.t()), 1e-6)


def test_all_ignored_gives_nan_for_the_mean_and_zero_for_the_sum_and_no_gradient():
    labels = torch.full((4,), -100)
    for reduction in ("mean", "sum"):
        logits = torch.randn(4, 9, requires_grad=True)
        x, weight = torch.randn(4, 5, requires_grad=True), torch.randn(9, 5, requires_grad=True)
        for got in (
            cross_entropy(logits, labels, reduction=reduction),
            linear_cross_entropy(x, weight, None, labels, reduction=reduction),
        ):
            got.backward()
            assert got.isnan() if reduction == "mean" else got == 0
        assert not logits.grad.any()
        assert not x.grad.any()
        assert not weight.grad.any()


def test_rows_without_a_label_are_not_read():
    logits = torch.full((3, 7), float("nan"), requires_grad=True)
    with torch.no_grad():
        logits[1] = torch.randn(7)
    got = cross_entropy(logits, torch.tensor([-100, 2, -100]))
    got.backward()
    assert got.isfinite()
    assert not logits.grad[[0, 2]].any()


@pytest.mark.parametrize("offset", [0.0, 1e4, -1e4])
def test_large_logits_keep_their_differences(offset):
    labels = some_labels(20, 50, 0.0)
    logits = (torch.randn(20, 50) * 8 + offset).requires_grad_()
    check(
        lambda x: cross_entropy(x, labels, reduction="none"),
        lambda x: F.cross_entropy(x, labels, reduction="none"),
        [logits],
        tolerance=1e-5,
    )


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), 1e30, -1e30])
def test_extreme_logits_come_out_as_in_torch(value):
    logits = torch.randn(6, 40)
    logits[2, 5], logits[4, :] = value, value
    labels = torch.tensor([1, 2, 5, 3, 7, 0])
    got, want = (f(logits, labels, reduction="none") for f in (cross_entropy, F.cross_entropy))
    assert_near(got, want, 1e-6)


def test_a_tied_weight_gets_the_sum_of_both_gradients():
    table = leaf(30, 12)
    wide = table.detach().double().requires_grad_()
    ids, labels = torch.arange(20) % 30, some_labels(20, 30)
    linear_cross_entropy(F.embedding(ids, table), table, None, labels).backward()
    F.cross_entropy(F.embedding(ids, wide) @ wide.t(), labels).backward()
    assert_near(table.grad, wide.grad, 1e-6)


def test_only_the_gradients_asked_for_are_computed():
    x, weight, bias = leaf(6, 8), leaf(10, 8).detach(), leaf(10).detach()
    linear_cross_entropy(x, weight, bias, some_labels(6, 10, 0.0)).backward()
    assert x.grad is not None
    with torch.no_grad():
        assert linear_cross_entropy(x, weight, bias, some_labels(6, 10)).grad_fn is None


def test_gradients_accumulate_over_calls():
    x, weight = leaf(6, 8), leaf(10, 8)
    labels = some_labels(6, 10, 0.0)
    (0.5 * linear_cross_entropy(x, weight, None, labels)).backward()
    (0.5 * linear_cross_entropy(x, weight, None, labels)).backward()
    wide = weight.detach().double().requires_grad_()
    F.cross_entropy(x.detach().double() @ wide.t(), labels).backward()
    assert_near(weight.grad, wide.grad, 1e-6)


def test_a_second_backward_through_the_fused_head_is_refused():
    x, weight = leaf(6, 8), leaf(10, 8)
    loss = linear_cross_entropy(x, weight, None, some_labels(6, 10, 0.0))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward"):
        loss.backward()


@pytest.mark.parametrize("label", [-1, 10, 2**40])
def test_an_impossible_label_is_named(label):
    labels = torch.tensor([1, -100, label])
    with pytest.raises(IndexError, match=f"label {label} at position 2 is not one of the 10 classes"):
        cross_entropy(torch.randn(3, 10), labels)
    with pytest.raises(IndexError, match=f"label {label} at position 2 is not one of the 10 classes"):
        linear_cross_entropy(torch.randn(3, 4), torch.randn(10, 4), None, labels)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: cross_entropy(torch.randn(3, 4), torch.zeros(2, dtype=torch.int64)), r"labels has shape \(2,\)"),
        (lambda: cross_entropy(torch.randn(3, 4), torch.zeros(3)), "labels has dtype float32"),
        (
            lambda: cross_entropy(torch.randn(3, 4).double(), torch.zeros(3, dtype=torch.int64)),
            "logits has dtype float64",
        ),
        (
            lambda: cross_entropy(torch.randn(3, 4), torch.zeros(3, dtype=torch.int64), reduction="avg"),
            "reduction is 'avg'",
        ),
        (
            lambda: linear_cross_entropy(
                torch.randn(3, 4), torch.randn(10, 5), None, torch.zeros(3, dtype=torch.int64)
            ),
            r"weight has shape \(10, 5\)",
        ),
        (
            lambda: linear_cross_entropy(
                torch.randn(3, 4), torch.randn(10, 4), torch.randn(9), torch.zeros(3, dtype=torch.int64)
            ),
            r"bias has shape \(9,\)",
        ),
    ],
)
def test_wrong_arguments_are_named(call, words):
    with pytest.raises(ValueError, match=words):
        call()
