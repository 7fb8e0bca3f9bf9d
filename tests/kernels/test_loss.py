"""Cross entropy, alone and with its linear layer, equals the plain formula."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from kernels.plain import DTYPES, assert_near, check, leaf, random_cases
from stoker.kernels import loss as module
from stoker.kernels import microkernels, products
from stoker.kernels.loss import REDUCTIONS, cross_entropy, linear_cross_entropy, linear_log_probs


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


TERMS = {
    "softcap": {"softcap": 2.0},
    "label_smoothing": {"label_smoothing": 0.1},
    "z_loss": {"z_loss": 0.01},
    "scale": {"scale": 0.3},
    "softcap and scale": {"softcap": 1.5, "scale": 0.5},
    "smoothing and z": {"label_smoothing": 0.2, "z_loss": 0.02},
    "all": {"softcap": 3.0, "label_smoothing": 0.1, "z_loss": 0.005, "scale": 1.7},
}


def formula(x, w, b, labels, reduction, softcap=None, label_smoothing=0.0, z_loss=0.0, scale=1.0, divisor=1):
    logits = scale * F.linear(x, w, b)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    losses = F.cross_entropy(logits, labels, reduction="none", label_smoothing=label_smoothing)
    losses = losses + (labels != -100) * z_loss * logits.logsumexp(-1).square()
    if reduction == "none":
        return losses
    return losses[labels != -100].mean() if reduction == "mean" else losses.sum() / divisor


def compare_linear(rows, hidden, classes, dtype, reduction, bias=True, weights=torch.float32, ignored=0.4, **terms):
    labels = some_labels(rows, classes, ignored)
    leaves = [
        leaf(rows, hidden, dtype=dtype),
        leaf(classes, hidden, dtype=weights, seed=1),
        leaf(classes, dtype=weights, seed=2) if bias else None,
    ]
    if dtype == torch.bfloat16 and weights == torch.float32:
        # As under autocast, a CPU with bf16 units rounds these weights; they are exact in bf16, so rounding changes nothing.
        leaves[1] = leaves[1].detach().bfloat16().float().requires_grad_()
    check(
        lambda x, w, b: linear_cross_entropy(x, w, b, labels, reduction=reduction, **terms),
        lambda x, w, b: formula(x, w, b, labels, reduction, **terms),
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
    monkeypatch.setattr(module, "BLOCK_BYTES", 4 * 50 * 7)  # seven rows of logits
    compare_linear(64, 20, 50, torch.float32, reduction)


def test_the_fused_head_takes_bf16_weights():
    compare_linear(30, 20, 50, torch.bfloat16, "mean", weights=torch.bfloat16)
    compare_linear(30, 20, 50, torch.float32, "sum", weights=torch.bfloat16)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS)
def test_every_term_of_the_loss_is_that_of_the_formula(monkeypatch, terms, reduction):
    for dtype, weights in itertools.product(DTYPES, DTYPES):
        compare_linear(37, 24, 601, dtype, reduction, weights=weights, **terms)
    compare_linear(1, 8, 33, torch.float32, reduction, bias=False, ignored=0.0, **terms)
    compare_linear(3, 8, 33, torch.float32, reduction, ignored=1.0, **terms)
    monkeypatch.setattr(module, "BLOCK_BYTES", 4 * 601 * 7)  # seven rows of logits
    for dtype in DTYPES:
        compare_linear(37, 24, 601, dtype, reduction, weights=dtype, **terms)


@pytest.mark.usefixtures("every_engine")
@pytest.mark.parametrize("units", [False, True])
@pytest.mark.parametrize("engine", products.ENGINES)
def test_logits_of_bf16_are_never_rounded(monkeypatch, engine, units):
    """The losses are as exact as those of fp32, whatever the engine and the CPU; only gradients may be rounded."""
    monkeypatch.setenv("STOKER_LINEAR_ENGINE", engine)
    monkeypatch.setattr(microkernels, "torch_has_bf16_units", lambda: units)
    monkeypatch.setattr(module, "BLOCK_BYTES", 4 * 501 * 7)
    labels = some_labels(40, 501)
    x, weight, bias = (leaf(*shape, dtype=torch.bfloat16) for shape in ((40, 64), (501, 64), (501,)))
    got = linear_cross_entropy(x, weight, bias, labels, reduction="none", softcap=30.0)
    assert_near(got, formula(x.double(), weight.double(), bias.double(), labels, "none", softcap=30.0), 1e-6)
    compare_linear(40, 64, 501, torch.bfloat16, "mean", weights=torch.bfloat16)
    compare_linear(40, 64, 501, torch.bfloat16, "sum", weights=torch.float32)
    compare_linear(40, 64, 501, torch.float32, "sum", weights=torch.bfloat16)


def largest_allocation(run):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    return max(event.self_cpu_memory_usage for event in profile.events())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_frozen_weight_is_neither_widened_nor_given_a_gradient(monkeypatch, dtype):
    monkeypatch.setattr(module, "BLOCK_BYTES", 4 * 3000 * 7)
    x, weight, labels = leaf(20, 64, dtype=dtype), leaf(3000, 64, dtype=dtype).detach(), some_labels(20, 3000)
    assert largest_allocation(lambda: linear_cross_entropy(x, weight, None, labels).backward()) < weight.nbytes
    terms = [1.0, 0.0, 0.0, 0.0]
    arguments = (x.detach(), weight, None, labels, None, -100, 2, terms, True, False, False)
    _, dx, dweight, dbias = torch.ops.stoker.linear_cross_entropy(*arguments)
    assert (dx.shape, dweight.shape, dbias.shape) == (x.shape, (0,), (0,))


def test_a_factor_on_the_loss_costs_no_second_gradient_of_the_weight():
    x, weight, labels = leaf(20, 64), leaf(3000, 64), some_labels(20, 3000)
    loss = linear_cross_entropy(x, weight, None, labels, reduction="sum") / 7
    assert largest_allocation(loss.backward) < weight.nbytes


@pytest.mark.parametrize("divisor", [7, 0.25, torch.tensor(7), torch.tensor(7.5)], ids=str)
def test_the_divisor_is_that_of_the_sum(divisor):
    labels = some_labels(20, 50)
    check(
        lambda x, w: linear_cross_entropy(x, w, None, labels, reduction="sum", divisor=divisor),
        lambda x, w: formula(x, w, None, labels, "sum", divisor=divisor),
        [leaf(20, 8), leaf(50, 8)],
    )


def test_a_cap_takes_logits_of_any_size():
    """tanh is 1 or -1 there, with a slope of 0; near 0 it keeps all of its digits."""
    weight, labels = torch.eye(4), torch.tensor([0, 1, 2, 3])
    x = torch.tensor([[1e30, -1e30, 0, 1], [float("inf"), 3, -300, 2], [1e-6, 2e-6, 3e-7, 0], [30, 88, -88, 200.0]])
    check(
        lambda x: linear_cross_entropy(x, weight, None, labels, reduction="none", softcap=30.0),
        lambda x: F.cross_entropy(30 * torch.tanh(x / 30), labels, reduction="none"),
        [x.nan_to_num(posinf=3e38).requires_grad_()],
    )
    x = torch.linspace(-1e-3, 1e-3, 64)
    losses = linear_cross_entropy(
        x[:, None],
        torch.tensor([[1.0], [0.0]]),
        None,
        torch.zeros(64, dtype=torch.int64),
        reduction="none",
        softcap=1e-3,
    )
    assert_near(losses, F.softplus(-1e-3 * torch.tanh(x.double() / 1e-3)), 1e-7)


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


def some_loss(**options):
    return linear_cross_entropy(
        torch.randn(3, 4), torch.randn(10, 4), None, torch.zeros(3, dtype=torch.int64), **options
    )


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
        (lambda: some_loss(softcap=0.0), "softcap is 0.0; it must be positive"),
        (lambda: some_loss(label_smoothing=1.5), "label_smoothing is 1.5; it must be from 0 to 1"),
        (lambda: some_loss(z_loss=-1.0), "z_loss is -1.0; it must be 0 or more"),
        (lambda: some_loss(scale=float("nan")), "scale is nan; it must be positive"),
        (lambda: some_loss(divisor=3), "divisor is for reduction='sum', not 'mean'"),
        (lambda: some_loss(divisor=torch.ones(2), reduction="sum"), r"divisor has shape \(2,\)"),
    ],
)
def test_wrong_arguments_are_named(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def plain_log_probs(x, weight, bias, labels, softcap=None, scale=1.0):
    logits = F.linear(x.double(), weight.double(), None if bias is None else bias.double()) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    everything = logits.log_softmax(-1)
    chosen = everything.gather(1, labels[:, None]).squeeze(1)
    return chosen, -(everything.exp() * everything).sum(-1), logits.argmax(-1) == labels


@pytest.mark.parametrize("gradient", ["equal", "different"])
@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"scale": 0.3}, {"softcap": 1.5, "scale": 0.5}], ids=str)
@pytest.mark.parametrize("shape", [(37, 53, 16), (1, 3, 4), (5, 700, 8)], ids=str)
def test_log_probs_entropies_and_hits_equal_the_plain_formula(shape, options, gradient):
    rows, classes, hidden = shape
    x, weight, bias = leaf(rows, hidden), leaf(classes, hidden), leaf(classes)
    labels = some_labels(rows, classes, 0.0)
    actual, entropy, top = linear_log_probs(x, weight, bias, labels, **options)
    expected, wanted_entropy, wanted_top = plain_log_probs(x, weight, bias, labels, **options)
    assert_near(actual, expected.float(), 1e-5)
    assert_near(entropy, wanted_entropy.float(), 1e-5)
    assert torch.equal(top, wanted_top)
    assert not entropy.requires_grad
    dy = torch.full((rows,), -0.3) if gradient == "equal" else torch.linspace(-1.0, 2.0, rows)
    ours = torch.autograd.grad(actual, (x, weight, bias), dy)
    plain = torch.autograd.grad(expected, (x, weight, bias), dy.double())
    for one, other in zip(ours, plain, strict=True):
        assert_near(one, other, 1e-5)


def test_log_probs_in_several_blocks_with_a_frozen_weight(monkeypatch):
    monkeypatch.setattr(module, "BLOCK_BYTES", 4 * 53 * 8)  # eight rows
    x, weight = leaf(37, 16), torch.randn(53, 16)
    labels = some_labels(37, 53, 0.0)
    actual, *_ = linear_log_probs(x, weight, None, labels)
    expected, *_ = plain_log_probs(x, weight, None, labels)
    dy = torch.linspace(-1.0, 2.0, 37)
    assert_near(torch.autograd.grad(actual, x, dy)[0], torch.autograd.grad(expected, x, dy.double())[0], 1e-5)


def test_the_first_of_several_equal_logits_is_the_likeliest_class():
    weight = torch.tensor([[1.0], [2.0], [2.0], [0.0]])
    x = torch.ones(4, 1)
    *_, top = linear_log_probs(x, weight, None, torch.arange(4))
    assert top.tolist() == [False, True, False, False]


def test_log_probs_of_no_rows_are_empty():
    x, weight = leaf(0, 4), leaf(5, 4)
    log_probs, entropy, top = linear_log_probs(x, weight, None, torch.zeros(0, dtype=torch.int64))
    assert log_probs.shape == entropy.shape == top.shape == (0,)
    log_probs.sum().backward()
    assert float(weight.grad.abs().sum()) == 0.0
