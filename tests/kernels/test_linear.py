"""Linear layers equal the plain formula by every engine, and the choice between engines is stable and can be forced."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.kernels import engines, microkernels, products
from stoker.kernels.linear import linear, linear_packed

pytestmark = pytest.mark.usefixtures("every_engine")

FP32, BF16 = 2e-6, 1e-2  # relative error of a whole tensor, in norm


def distance(got, want, size=None) -> float:
    """The error in norm, relative to `want`, or to the `size` of the terms summed where they may cancel."""
    return ((got.double() - want).norm() / (want if size is None else size).norm().clamp_min(1e-30)).item()


def check(rows, width, outs, engine, dtype=torch.float32, weight_dtype=torch.float32, bias=True, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=generator).to(dtype).requires_grad_()
    weights = [torch.randn(out, width, generator=generator).to(weight_dtype).requires_grad_() for out in outs]
    biases = [torch.randn(out, generator=generator).to(weight_dtype).requires_grad_() for out in outs] if bias else None
    y = linear_packed(x, weights, biases, engine=engine)
    grad = torch.randn(y.shape, generator=generator).to(dtype)
    y.backward(grad)

    x2 = x.detach().double().requires_grad_()
    weights2 = [weight.detach().double().requires_grad_() for weight in weights]
    biases2 = [b.detach().double().requires_grad_() for b in biases] if biases else [None] * len(outs)
    want = torch.cat([torch.nn.functional.linear(x2, w, b) for w, b in zip(weights2, biases2, strict=True)], -1)
    want.backward(grad.double())

    tolerance = FP32 if dtype == weight_dtype == torch.float32 else BF16
    assert y.dtype == dtype
    stacked, size = torch.cat(weights2).detach(), grad.double().abs()
    assert distance(y, want, x2.abs() @ stacked.abs().t() + want.abs()) < tolerance
    assert distance(x.grad, x2.grad, size @ stacked.abs()) < tolerance
    for got, expected, part in zip(weights, weights2, size.split(outs, 1), strict=True):
        assert got.grad.dtype == weight_dtype
        assert distance(got.grad, expected.grad, part.t() @ x2.abs()) < tolerance
    for got, expected, part in zip(biases or [], biases2, size.split(outs, 1), strict=False):
        assert got.grad.dtype == weight_dtype
        assert distance(got.grad, expected.grad, part.sum(0)) < tolerance


SHAPES = [
    (1, 1, [1]),
    (1, 3, [5]),
    (7, 96, [33]),
    (97, 257, [385]),
    (130, 64, [17, 5, 64]),
    (200, 300, [300, 300, 300]),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "width", "outs"), SHAPES, ids=str)
@pytest.mark.parametrize("engine", products.ENGINES)
def test_every_engine_equals_the_formula(engine, rows, width, outs, dtype):
    check(rows, width, outs, engine, dtype)
    check(rows, width, outs, engine, dtype, bias=False)


@pytest.mark.parametrize("engine", products.ENGINES)
def test_gradients_of_weights_are_fp32_sums_of_bf16_products(engine):
    generator = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(300, columns, generator=generator).to(torch.bfloat16) for columns in (96, 160))
    weight = torch.randn(160, 96, generator=generator).requires_grad_()
    linear(x, weight, engine=engine).backward(grad)
    assert distance(weight.grad, grad.double().t() @ x.double()) < FP32


@pytest.mark.parametrize("engine", products.ENGINES)
def test_bf16_sums_over_several_weights_are_rounded_once(engine):
    """1 + 1/256 + 1/256 is a bf16 number, but each half of the way to it is not."""
    x = torch.ones(1, 1, dtype=torch.bfloat16, requires_grad=True)
    weights = [torch.tensor([[value]]) for value in (1.0, 2.0**-8, 2.0**-8)]
    linear_packed(x, weights, engine=engine).backward(torch.ones(1, 3, dtype=torch.bfloat16))
    assert x.grad.item() == 1.0 + 2.0**-7


@pytest.mark.parametrize("rows", [50, 300])
def test_bf16_weights_work_too(rows):
    check(rows, 70, [90], "stoker", torch.bfloat16, torch.bfloat16)
    check(rows, 70, [90], "stoker", torch.float32, torch.bfloat16)


@pytest.mark.parametrize("engine", products.ENGINES)
def test_fp32_activations_are_never_rounded_to_the_type_of_bf16_weights(engine):
    x, weight = torch.full((2, 8), 1.0 + 2.0**-12), torch.ones(3, 8, dtype=torch.bfloat16)
    assert torch.equal(linear(x, weight, engine=engine), torch.full((2, 3), 8.0 + 2.0**-9))


@settings(max_examples=150, deadline=None)
@given(
    rows=st.integers(1, 230) | st.integers(250, 320),
    width=st.integers(1, 300),
    outs=st.lists(st.integers(1, 420), min_size=1, max_size=3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    bias=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_random_shapes(rows, width, outs, dtype, bias, seed):
    check(rows, width, outs, "stoker", dtype, bias=bias, seed=seed)


@pytest.mark.parametrize("rows", [60, 500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_number_of_threads_changes_no_bit(rows, dtype):
    x, weight = torch.randn(rows, 300).to(dtype), torch.randn(700, 300)

    def results(threads: int):
        previous = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            leaf, parameter = x.clone().requires_grad_(), weight.clone().requires_grad_()
            bias = torch.zeros(700, requires_grad=True)
            y = linear(leaf, parameter, bias, engine="stoker")
            y.backward(y.detach())
            return y, leaf.grad, parameter.grad, bias.grad
        finally:
            torch.set_num_threads(previous)

    one = results(1)
    for threads in (2, 3):
        assert all(torch.equal(a, b) for a, b in zip(results(threads), one, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_how_many_rows_there_are(dtype):
    """Few rows and many rows are multiplied in different ways that sum in the same order."""
    x, weight = torch.randn(300, 600).to(dtype), torch.randn(150, 600)
    many = linear(x, weight, engine="stoker")
    assert torch.equal(linear(x[:256], weight, engine="stoker"), many[:256])
    assert torch.equal(linear(x[:1], weight, engine="stoker"), many[:1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("engine", products.ENGINES)
def test_a_product_can_be_added_to_what_is_there(engine, dtype):
    for rows, terms in ((5, 1), (300, 2)):
        pairs = [(torch.randn(rows, 40).to(dtype), torch.randn(40, 70).to(dtype)) for _ in range(terms)]
        before = torch.randn(rows, 70)
        out = before.clone()
        products.multiply(pairs, out, None, engine, accumulate=True)
        want = before.double() + sum(a.double() @ b.double() for a, b in pairs)
        assert distance(out, want) < (BF16 if dtype == torch.bfloat16 else FP32)


def test_any_leading_dimensions_and_strides_work():
    x = torch.randn(3, 8, 5).transpose(1, 2)
    weight = torch.randn(8, 6).t()
    for engine in products.ENGINES:
        y = linear(x, weight, engine=engine)
        assert y.shape == (3, 5, 6)
        assert torch.allclose(y, torch.nn.functional.linear(x, weight), atol=1e-5)


def test_zero_rows_give_an_empty_result_and_zero_gradients():
    for engine in products.ENGINES:
        x, weight = torch.zeros(0, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
        bias = torch.zeros(3, requires_grad=True)
        y = linear(x, weight, bias, engine=engine)
        y.sum().backward()
        assert y.shape == (0, 3)
        assert torch.equal(weight.grad, torch.zeros(3, 4))
        assert torch.equal(bias.grad, torch.zeros(3))


def test_infinities_and_nan_are_propagated():
    torch.manual_seed(0)
    x = torch.randn(100, 50)
    x[3, 4], x[7, 1], x[9, 9] = float("inf"), float("nan"), 1e30
    weight = torch.rand(40, 50) + 0.1
    want = torch.nn.functional.linear(x, weight)
    y = linear(x, weight, engine="stoker")
    assert torch.equal(y.isnan(), want.isnan())
    assert torch.equal(y.isinf(), want.isinf())
    finite = want.isfinite()
    assert torch.allclose(y[finite], want[finite], rtol=1e-4, atol=1e-4)


def test_only_required_gradients_are_computed():
    x, frozen = torch.randn(5, 4, requires_grad=True), torch.randn(3, 4)
    trained = torch.randn(3, 4, requires_grad=True)
    linear_packed(x, [frozen, trained], engine="stoker").sum().backward()
    assert frozen.grad is None
    assert trained.grad is not None


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="weight has shape"):
        linear(torch.zeros(3, 4), torch.zeros(5, 6))
    with pytest.raises(ValueError, match="bias has shape"):
        linear(torch.zeros(3, 4), torch.zeros(5, 4), torch.zeros(4))
    with pytest.raises(ValueError, match="x has dtype float64"):
        linear(torch.zeros(3, 4, dtype=torch.float64), torch.zeros(5, 4))
    with pytest.raises(ValueError, match="2 weights but 1 biases"):
        linear_packed(torch.zeros(3, 4), [torch.zeros(5, 4)] * 2, [torch.zeros(5)])
    with pytest.raises(ValueError, match="one of the biases is None"):
        linear_packed(torch.zeros(3, 4), [torch.zeros(5, 4)] * 2, [torch.zeros(5), None])
    with pytest.raises(ValueError, match="bias is on meta"):
        linear(torch.zeros(3, 4), torch.zeros(5, 4), torch.zeros(5, device="meta"))
    with pytest.raises(ValueError, match="engine is 'mkl'; choose one of auto"):
        linear(torch.zeros(3, 4), torch.zeros(5, 4), engine="mkl")


def test_the_dispatcher_accepts_the_operator():
    x, weight, bias = (
        torch.randn(5, 8, requires_grad=True),
        torch.randn(4, 8, requires_grad=True),
        torch.randn(4, requires_grad=True),
    )
    torch.library.opcheck(torch.ops.stoker.linear.default, (x, [weight, weight], [], [bias, bias], "stoker"))


class TestChoice:
    @pytest.fixture(autouse=True)
    def own_cache(self, tmp_path, monkeypatch):
        monkeypatch.setenv("STOKER_CACHE_DIR", str(tmp_path))
        monkeypatch.delenv("STOKER_LINEAR_ENGINE", raising=False)
        engines.clear_cache()
        yield
        engines.clear_cache()

    def test_is_measured_once_and_stored_on_disk(self, tmp_path, monkeypatch):
        first = engines.choose("nt", 300, 256, 256, torch.float32)
        assert first in products.ENGINES
        stored = json.loads((tmp_path / "engines.json").read_text())
        assert [first] == [engine for choices in stored.values() for engine in choices.values()]
        engines.clear_cache()
        monkeypatch.setattr(engines, "measure_fastest", lambda *_: pytest.fail("measured again"))
        assert engines.choose("nt", 300, 256, 256, torch.float32) == first
        assert engines.choose("nt", 400, 256, 256, torch.float32) == first  # same class

    def test_measuring_does_not_change_the_random_state(self):
        torch.manual_seed(5)
        want = torch.rand(3)
        torch.manual_seed(5)
        engines.choose("tn", 256, 256, 300, torch.float32)
        assert torch.equal(torch.rand(3), want)

    def test_takes_the_fastest_and_torch_for_a_tie(self, monkeypatch):
        seconds = {"torch": 1.0, "stoker": 0.99, "onednn": 1.0}
        monkeypatch.setattr(engines, "make_trial", lambda *_: seconds.__getitem__)
        assert engines.choose("nt", 3000, 256, 256, torch.float32) == "torch"
        seconds["stoker"] = 0.9
        assert engines.choose("nn", 3000, 256, 256, torch.float32) == "stoker"

    def test_an_environment_variable_or_the_argument_forces_one(self, monkeypatch):
        monkeypatch.setattr(engines, "measure_fastest", lambda *_: pytest.fail("measured"))
        monkeypatch.setenv("STOKER_LINEAR_ENGINE", "torch")
        assert engines.choose("nt", 3000, 256, 256, torch.float32) == "torch"
        assert engines.choose("nt", 3000, 256, 256, torch.float32, "stoker") == "stoker"
        monkeypatch.setenv("STOKER_LINEAR_ENGINE", "fast")
        with pytest.raises(ValueError, match="engine is 'fast'"):
            engines.choose("nt", 3000, 256, 256, torch.float32)

    def test_torch_never_multiplies_bf16_without_bf16_units(self, monkeypatch):
        monkeypatch.setattr(microkernels, "torch_has_bf16_units", lambda: False)
        for kind in ("nt", "nn", "tn"):
            assert engines.choose(kind, 20, 8, 8, torch.bfloat16) != "torch"
            assert engines.choose(kind, 300, 256, 256, torch.bfloat16) != "torch"

    def test_an_unwritable_cache_costs_only_the_measurement(self, tmp_path, monkeypatch, caplog):
        blocked = tmp_path / "file"
        blocked.write_text("")
        monkeypatch.setenv("STOKER_CACHE_DIR", str(blocked))
        with caplog.at_level(logging.DEBUG, "stoker.kernels"):
            assert engines.choose("nt", 300, 256, 256, torch.float32) in products.ENGINES
        assert "not stored" in caplog.text

    def test_a_broken_cache_is_measured_again(self, tmp_path):
        (tmp_path / "engines.json").write_text('{"x": 3, "' + engines._key() + '": [1, 2]}')
        assert engines.choose("nt", 300, 256, 256, torch.float32) in products.ENGINES


@pytest.mark.parametrize("engine", products.ENGINES)
def test_an_input_without_features_gives_the_bias(engine):
    bias = torch.arange(4.0)
    y = linear(torch.zeros(2, 3, 0), torch.zeros(4, 0), bias, engine=engine)
    assert torch.equal(y, bias.expand(2, 3, 4))


def test_an_input_without_dimensions_is_refused():
    with pytest.raises(ValueError, match="linear: x has no dimension"):
        linear(torch.tensor(1.0), torch.ones(2, 1))
