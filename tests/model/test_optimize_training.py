"""Dropout, precision, optimizer and memory: what training needs beyond a gradient."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import tiny_models as tiny
import torch
from torch import Tensor, nn

import stoker
from stoker.kernels import microkernels
from stoker.machine import Machine, rates
from stoker.model import memory, precision


def _batch_without_padding(family: str, head: str) -> tiny.Batch:
    full = tiny.batch(family, head, lengths=(6, 6, 6, 6))
    full.inputs["attention_mask"].fill_(1)  # stock and padding-free are then the same model
    return full


def _steps(model: nn.Module, full: tiny.Batch, repeats: int, seed: int) -> torch.Tensor:
    """(repeats, 1 + parameters): loss and a few gradient sums, over `repeats` draws of dropout."""
    torch.manual_seed(seed)
    rows = []
    for _ in range(repeats):
        model.zero_grad()
        loss = model(**full.kwargs).loss
        loss.backward()
        rows.append(torch.stack([loss.detach(), *(p.grad.flatten()[:4].sum() for p in model.parameters())]))
    return torch.stack(rows).double()


@pytest.mark.parametrize("family", ["Bert", "DistilBert", "ModernBert", "MPNet", "DebertaV2"])
def test_with_dropout_expected_loss_and_gradient_are_those_of_stock(family: str) -> None:
    head, repeats = "SequenceClassification", 150
    full = _batch_without_padding(family, head)
    stock = tiny.model(family, head, dropout=0.2)
    model = stoker.optimize(copy.deepcopy(stock), dtype=torch.float32)
    first, second = _steps(stock, full, repeats, 1), _steps(model, full, repeats, 2)
    spread = (first.var(0) / repeats + second.var(0) / repeats).sqrt() + 1e-9
    scores = (first.mean(0) - second.mean(0)) / spread
    assert scores.abs().max() < 5.0, "means differ by more than sampling explains"
    assert float(scores.square().mean()) < 2.0


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("where", ["attention", "embeddings", "layers"])
def test_dropout_causes_the_same_variance_of_hidden_states_as_in_stock(family: str, where: str) -> None:
    """The variance over draws, averaged over some hundreds of elements, is sharp enough to miss no dropout."""
    if family == "EuroBert" and where != "attention":
        pytest.skip("it has dropout in attention only")
    repeats, full = 100, _batch_without_padding(family, "Model")
    stock = tiny.model(family, dropout=0.0)
    _set_dropout(stock, where, 0.2)
    model = stoker.optimize(copy.deepcopy(stock), dtype=torch.float32)
    variances = []
    for one, seed in ((stock, 1), (model, 2)):
        torch.manual_seed(seed)
        with torch.no_grad():
            states = torch.stack([one(**full.inputs).last_hidden_state for _ in range(repeats)])
        variances.append(states.var(0).mean().item())
    assert variances[0] > 1e-4
    assert variances[1] == pytest.approx(variances[0], rel=0.12)


def _set_dropout(model: nn.Module, where: str, p: float) -> None:
    """Sets dropout in one place: of attention weights, of the embeddings, or in the rest of the layers."""
    for name, module in model.named_modules():
        parent = type(model.get_submodule(name.rpartition(".")[0])).__name__
        if isinstance(module, nn.Dropout):
            weights = parent.endswith("SelfAttention") or name.endswith("attention.attention_dropout")
            place = "attention" if weights else "embeddings" if "embeddings" in name else "layers"
            module.p = p if place == where else 0.0
        if isinstance(getattr(module, "attention_dropout", None), float) and where == "attention":
            module.attention_dropout = p  # ModernBERT keeps it as a number


def test_the_same_seed_gives_the_same_step() -> None:
    model = stoker.optimize(tiny.model("Bert", "QuestionAnswering", dropout=0.1), dtype=torch.float32)
    full = tiny.batch("Bert", "QuestionAnswering")
    losses = []
    for _ in range(2):
        torch.manual_seed(7)
        losses.append(model(**full.kwargs).loss)
    assert torch.equal(*losses)


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("mode", ["asked", "autocast", "both"])
def test_bf16_keeps_fp32_parameters_losses_and_gradients(family: str, mode: str) -> None:
    head = tiny.token_head(family)
    full = tiny.batch(family, head)
    stock = tiny.model(family, head)
    loss, _, gradients = tiny.truth(stock, head, full)
    model = stoker.optimize(copy.deepcopy(stock), dtype=None if mode == "autocast" else torch.bfloat16)
    inner: list[torch.dtype] = []
    _spy_on_layers(model, inner)
    with torch.autocast("cpu", torch.bfloat16, enabled=mode != "asked"):
        output = model(**full.kwargs)
    output.loss.backward()
    assert set(inner) == {torch.bfloat16}
    assert output.loss.dtype == torch.float32
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters() if p.grad is not None)
    torch.testing.assert_close(output.loss.detach(), loss, rtol=5e-2, atol=5e-2)
    flat = [torch.cat([g[name].flatten() for name in sorted(gradients)]) for g in (tiny.gradients(model), gradients)]
    assert nn.functional.cosine_similarity(*flat, dim=0) > 0.99


def _spy_on_layers(model: nn.Module, seen: list[torch.dtype]) -> None:
    """Records the type layers hand on, without a hook, which would make the call stock's."""
    from stoker.model.fused_layer import FusedLayer

    for module in model.modules():
        if isinstance(module, FusedLayer):
            cls = type(module)
            watched = type(cls.__name__, (cls,), {"__module__": cls.__module__, "forward": _spying(cls, seen)})
            module.__class__ = watched


def _spying(cls: type, seen: list[torch.dtype]):
    def forward(self, *args, **kwargs):
        output = cls.forward(self, *args, **kwargs)
        seen.append((output[0] if isinstance(output, tuple) else output).dtype)
        return output

    return forward


def test_requested_fp32_stays_fp32_inside_autocast() -> None:
    stock = tiny.model("Bert")
    model = stoker.optimize(copy.deepcopy(stock), dtype=torch.float32)
    full = tiny.batch("Bert", "Model", lengths=(6, 6))
    full.inputs["attention_mask"].fill_(1)
    with torch.autocast("cpu", torch.bfloat16):
        output = model(**full.inputs).last_hidden_state
    torch.testing.assert_close(output, stock(**full.inputs).last_hidden_state, rtol=1e-4, atol=1e-4)


def test_a_model_stored_in_bf16_stays_bf16() -> None:
    model = stoker.optimize(tiny.model("Bert", "QuestionAnswering").to(torch.bfloat16))
    full = tiny.batch("Bert", "QuestionAnswering")
    output = model(**full.kwargs)
    output.loss.backward()
    assert output.start_logits.dtype == torch.bfloat16
    assert all(p.grad.dtype == torch.bfloat16 for p in model.parameters() if p.grad is not None)
    assert stoker.report(model).left_alone == ()


def test_fp32_input_on_bf16_weights_raises_as_in_stock_and_is_bf16_inside_autocast() -> None:
    stock = nn.Linear(6, 4).bfloat16()
    model, x = stoker.optimize(copy.deepcopy(stock)), torch.randn(3, 6)
    for one in (stock, model):
        with pytest.raises(RuntimeError, match="same dtype"):
            one(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(x).dtype == stock(x).dtype == torch.bfloat16
        torch.testing.assert_close(model(x), stock(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_autocast_sets_the_precision_of_an_unknown_family_and_the_report_says_so(dtype: torch.dtype) -> None:
    model = stoker.optimize(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)), dtype=dtype)
    assert "autocast" in stoker.report(model).precision
    x = torch.randn(32, 64)
    assert model(x).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert model(x).dtype == torch.bfloat16


OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_are_fused_in_place_and_keep_their_state(name: str) -> None:
    torch.manual_seed(0)
    stock = nn.Linear(6, 4)
    model = copy.deepcopy(stock)
    plain, fused = (OPTIMIZERS[name]([{"params": [m.weight]}, {"params": [m.bias], "lr": 0.5}]) for m in (stock, model))
    schedule = torch.optim.lr_scheduler.StepLR(fused, 1, gamma=1.0)
    for step in range(6):
        if step == 3:
            result = stoker.optimize(model, fused, dtype=torch.float32)
            assert result[1] is fused
            assert all(group["fused"] for group in fused.param_groups)
            assert [group["lr"] for group in fused.param_groups] == [1e-2, 0.5]
        for one, optimizer in ((stock, plain), (model, fused)):
            optimizer.zero_grad()
            one(torch.full((3, 6), 0.1 * step)).square().sum().backward()
            optimizer.step()
        schedule.step()
    torch.testing.assert_close(list(model.parameters()), list(stock.parameters()))
    stoker.restore(model, fused)
    assert not any(group["fused"] for group in fused.param_groups)
    fused.step()


def test_unknown_optimizers_are_left_alone() -> None:
    class Mine(torch.optim.AdamW):
        pass

    model = nn.Linear(2, 2)
    for optimizer in (Mine(model.parameters()), torch.optim.RMSprop(model.parameters())):
        assert stoker.optimize(model, optimizer, dtype=torch.float32) == (model, optimizer)
        assert not optimizer.param_groups[0].get("fused")
        assert "left alone" in stoker.report(model).optimizer


def test_adafactor_updates_as_in_stock_on_equal_gradients() -> None:
    from transformers.optimization import Adafactor

    stock = tiny.model("Bert")
    model, settings = copy.deepcopy(stock), {"lr": 1e-3, "scale_parameter": False, "relative_step": False}
    model, optimizer = stoker.optimize(model, Adafactor(model.parameters(), **settings))
    own = Adafactor(stock.parameters(), **settings)
    for _ in range(2):
        for one, other in zip(stock.parameters(), model.parameters(), strict=True):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
        own.step()
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(stock.parameters(), model.parameters(), strict=True))


def test_gradients_in_bf16_are_about_as_exact_as_those_of_stock() -> None:
    head, errors = "SequenceClassification", {"stock": 0.0, "ours": 0.0}
    for seed in range(4):
        stock, full = tiny.model("Bert", head, seed=seed), tiny.batch("Bert", head, seed=seed)
        exact = _gradient(copy.deepcopy(stock).double(), full, torch.float64)
        for side, one in (("stock", copy.deepcopy(stock)), ("ours", stoker.optimize(copy.deepcopy(stock)))):
            errors[side] += float((_gradient(one, full, torch.bfloat16) - exact).norm() / exact.norm())
    assert 0.0 < errors["ours"] < 2.5 * errors["stock"], errors  # residuals are bf16, which autocast keeps in fp32


def _gradient(model: nn.Module, full: tiny.Batch, dtype: torch.dtype) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        loss = model(**full.kwargs).loss
    loss.backward()
    return torch.cat([gradient.double().flatten() for gradient in tiny.gradients(model).values()])


def test_training_learns_as_stock_does() -> None:
    """Ten steps of AdamW without dropout follow the same curve."""
    curves = []
    for optimized in (False, True):
        model = tiny.model("Bert", "SequenceClassification")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        if optimized:
            model, optimizer = stoker.optimize(model, optimizer, dtype=torch.float32)
        curve = []
        for step in range(10):
            full = tiny.batch("Bert", "SequenceClassification", lengths=(9, 12, 3, 5, 7, 8), seed=step % 2)
            loss = model(**full.kwargs).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            curve.append(loss.item())
        curves.append(curve)
    assert curves[0] == pytest.approx(curves[1], rel=2e-3)
    assert curves[1][-1] < 0.8 * curves[1][0]


def test_steady_steps_cause_few_page_faults() -> None:
    assert memory.keep_mapped() == memory.keep_mapped()
    if "glibc keeps" not in memory.keep_mapped():
        pytest.skip(memory.keep_mapped())
    faults = []
    for _ in range(6):
        before = memory.minor_faults()
        (torch.ones(4 << 20) + 1).sum()
        faults.append(memory.minor_faults() - before)
    assert min(faults[2:]) < 1000, "32 MB fresh from the system would be 8,192 faults"


SHAPES = """
import torch
from stoker.model.memory import keep_mapped

keep_mapped()
weight = torch.randn(8, 8)
for length in (*range(1, 301), *range(1, 301)):
    torch.ops.mkldnn._linear_pointwise(torch.randn(length, 8), weight, None, "none", [], "")
"""


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
def test_onednn_evicts_the_oldest_shapes() -> None:
    # 300 shapes, twice: with room for 256, each has been forgotten when its turn comes again
    env = {**os.environ, "ONEDNN_VERBOSE": "profile_create", "OMP_NUM_THREADS": "1"}
    env.pop("ONEDNN_PRIMITIVE_CACHE_CAPACITY", None)
    done = subprocess.run([sys.executable, "-c", SHAPES], env=env, capture_output=True, text=True, check=True)
    if "create:cache_miss" not in done.stdout:
        pytest.skip("this oneDNN does not say what it creates")
    assert "create:cache_hit" not in done.stdout


@pytest.mark.parametrize(
    ("units", "gain", "expected"),
    [(False, 3.0, None), (True, 1.05, None), (True, 3.0, torch.bfloat16)],
)
def test_auto_chooses_the_faster_dtype_and_gives_the_reason(
    monkeypatch: pytest.MonkeyPatch, units: bool, gain: float, expected: torch.dtype | None
) -> None:
    """The CPU is a stand-in: the test runs on machines with bf16 units and without."""
    monkeypatch.setattr(precision, "torch_has_bf16_units", lambda: units)
    monkeypatch.setattr(rates, "bf16_training_gain", lambda: None)
    monkeypatch.setattr(precision, "bf16_product_gain", lambda: gain)
    dtype, reason = precision.choose("auto")
    assert dtype is expected
    assert "no bf16 units" in reason or "measured" in reason


@pytest.mark.parametrize("family", ["Bert", "ModernBert"])
def test_without_a_dtype_an_fp32_model_stays_fp32_on_every_cpu(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """A CPU whose bf16 units are ten times as fast is a stand-in; the numbers must be those of the machine without them."""
    stock, full = tiny.model(family, "QuestionAnswering"), tiny.batch(family, "QuestionAnswering")
    losses = []
    for units in (False, True):
        monkeypatch.setattr(precision, "torch_has_bf16_units", lambda units=units: units)
        monkeypatch.setattr(rates, "bf16_training_gain", lambda units=units: 10.0 if units else None)
        model = stoker.optimize(copy.deepcopy(stock))
        assert stoker.report(model).precision.startswith("fp32")
        losses.append(model(**full.kwargs).loss)
    assert torch.equal(*losses)


@pytest.mark.parametrize("units", [False, True])
def test_auto_computes_in_the_dtype_it_chose(monkeypatch: pytest.MonkeyPatch, units: bool) -> None:
    monkeypatch.setattr(precision, "torch_has_bf16_units", lambda: units)
    monkeypatch.setattr(rates, "bf16_training_gain", lambda: 10.0 if units else None)
    model = stoker.optimize(tiny.model("Bert", "QuestionAnswering"), dtype="auto")
    seen: list[torch.dtype] = []
    _spy_on_layers(model, seen)
    model(**tiny.batch("Bert", "QuestionAnswering").kwargs)
    assert set(seen) == {torch.bfloat16 if units else torch.float32}


@pytest.mark.parametrize(
    ("limit", "expected"), [(None, True), ("AVX512_CORE_AMX", True), ("AVX512_CORE", False), ("avx2", False)]
)
def test_bf16_units_that_onednn_may_not_use_do_not_count(
    monkeypatch: pytest.MonkeyPatch, recorded: Callable[[str], Machine], limit: str | None, expected: bool
) -> None:
    monkeypatch.setattr(microkernels, "this_machine", lambda: recorded("genoa"))
    monkeypatch.delenv("DNNL_MAX_CPU_ISA", raising=False)
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    if limit:
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    assert microkernels.torch_has_bf16_units() is expected


def test_the_gain_of_bf16_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "known", lambda machine: None)
    monkeypatch.setattr(
        precision, "_time_product", lambda matrix: {torch.float32: 4e-2, torch.bfloat16: 1e-2}[matrix.dtype]
    )
    precision.bf16_product_gain.cache_clear()
    try:
        assert precision.bf16_product_gain() == pytest.approx(4.0)
    finally:
        precision.bf16_product_gain.cache_clear()


def test_auto_trusts_a_measured_training_step_more_than_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "torch_has_bf16_units", lambda: True)
    monkeypatch.setattr(precision, "bf16_product_gain", lambda: 10.0)
    monkeypatch.setattr(rates, "bf16_training_gain", lambda: 1.01)
    assert precision.choose("auto")[0] is None
