"""Tracers, exporters, transforms and dispatch modes see the operators and results of the stock model."""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Callable
from typing import Any

import pytest
import tiny_models as tiny
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, grad, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import stoker

CASES = [
    ("Bert", "QuestionAnswering"),
    ("Bert", "MaskedLM"),
    ("ModernBert", "SequenceClassification"),
    ("MPNet", "SequenceClassification"),
    ("Albert", "TokenClassification"),
    ("DebertaV2", "SequenceClassification"),
]


class Pair:
    """A stock model and its optimized copy, and a padded batch; `run` gives their logits."""

    def __init__(self, family: str = "Bert", head: str = "SequenceClassification") -> None:
        self.stock = tiny.model(family, head).eval()
        self.model = stoker.optimize(copy.deepcopy(self.stock), dtype=torch.float32)
        inputs = tiny.batch(family, head).inputs
        self.ids, self.mask = inputs["input_ids"], inputs["attention_mask"]
        self.call = {"input_ids": self.ids, "attention_mask": self.mask}
        assert not bool(self.mask.all())

    def logits(self, one: Callable[..., Any], mask: Tensor | None = None) -> Tensor:
        output = one(input_ids=self.ids, attention_mask=self.mask if mask is None else mask)
        return output[0] if isinstance(output, tuple) else next(iter(output.values()))

    def assert_stock(self, one: Callable[..., Any]) -> None:
        """The same as stock also with another mask: nothing of the first one is left in the graph."""
        full = torch.ones_like(self.mask)
        for mask in (self.mask, full):
            torch.testing.assert_close(self.logits(one, mask), self.logits(self.stock, mask), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "head", "strict"), [*((*case, False) for case in CASES), (*CASES[0], True), ("MPNet", "MaskedLM", True)]
)
def test_an_optimized_model_is_exported_as_the_stock_model(family: str, head: str, strict: bool) -> None:
    if strict and not hasattr(torch.compiler, "is_exporting"):
        pytest.skip("needs torch 2.7")
    pair = Pair(family, head)
    exported = torch.export.export(pair.model, (), pair.call, strict=strict)
    assert "stoker" not in str(exported.graph)
    pair.assert_stock(exported.module())


@pytest.mark.parametrize(("family", "head"), CASES)
def test_an_optimized_model_is_traced_as_the_stock_model(family: str, head: str) -> None:
    pair = Pair(family, head)
    traced = torch.jit.trace(pair.model, example_kwarg_inputs=pair.call, strict=False)
    operators = re.sub(r" # .*", "", str(traced.inlined_graph))  # without paths of files, which name the checkout
    assert "stoker" not in operators
    pair.assert_stock(traced)


@pytest.mark.parametrize(
    ("mode", "pre_dispatch"), [("real", False), ("real", True), ("fake", False), ("symbolic", True)]
)
def test_make_fx_sees_stock_operators(mode: str, pre_dispatch: bool) -> None:
    pair = Pair()
    call = (pair.ids,) if mode == "real" else (pair.ids, pair.mask)  # stock looks into a mask that is not fake
    options = {"_allow_non_fake_inputs": True, "pre_dispatch": pre_dispatch}
    graph = make_fx(lambda *call: pair.model(*call).logits, tracing_mode=mode, **options)(*call)
    assert "stoker" not in graph.code
    torch.testing.assert_close(graph(*call), pair.stock(*call).logits, rtol=1e-4, atol=1e-4)


def test_fake_tensors_work_inside_and_outside_their_mode() -> None:
    pair = Pair()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        ids, mask = mode.from_tensor(pair.ids), mode.from_tensor(pair.mask)
        assert pair.model(ids, mask).logits.shape == pair.logits(pair.stock).shape
    # the tensors remember their mode
    assert pair.model(ids, mask).logits.shape == pair.logits(pair.stock).shape
    with mode:  # no memory for weights, as planners of memory do
        fake = stoker.optimize(tiny.model("Bert", "SequenceClassification").eval(), dtype=torch.float32)
    assert fake(ids, mask).logits.shape == pair.logits(pair.stock).shape


class _Names(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_dispatch_modes_see_the_operators_of_stock() -> None:
    pair = Pair()
    flops, names = [], []
    for one in (pair.stock, pair.model):
        with FlopCounterMode(display=False) as counter:
            pair.logits(one)
        with _Names() as listed:
            pair.logits(one)
        flops.append(counter.get_total_flops())
        names.append(listed.names)
    assert flops[1] == flops[0] > 0
    assert names[1] == names[0]


def test_torch_func_sees_stock_operators() -> None:
    pair = Pair()
    for one in (pair.stock, pair.model):
        one.set_attn_implementation("eager")  # the other one has no forward-mode derivative
    values = {name: parameter.detach() for name, parameter in pair.stock.named_parameters()}

    def loss(one: nn.Module, values: dict[str, Tensor], *call: Tensor) -> Tensor:
        return functional_call(one, values, call).logits.square().sum()

    def embedded(one: Any, x: Tensor) -> Tensor:
        return one(inputs_embeds=x, attention_mask=pair.mask).logits

    x = torch.randn(*pair.ids.shape, tiny.HIDDEN)
    results = []
    for one in (pair.stock, pair.model):
        whole = grad(loss, argnums=1)(one, values, pair.ids, pair.mask)
        each = vmap(grad(loss, argnums=1), (None, None, 0))(one, values, pair.ids[:, None])
        forward = jvp(lambda x, one=one: embedded(one, x), (x,), (torch.ones_like(x),))
        results.append((whole, each, forward))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)


def _legacy(model: nn.Module, pair: Pair, file: io.BytesIO) -> None:
    torch.onnx.export(model, (pair.ids, pair.mask), file, dynamo=False, input_names=["ids", "mask"])


def test_onnx_export_by_tracing_writes_the_stock_model() -> None:
    pair = Pair()
    written = []
    for one in (pair.stock, pair.model):
        file = io.BytesIO()
        _legacy(one, pair, file)
        written.append(file.getvalue())
    assert b"stoker" not in written[1]
    assert len(written[1]) == pytest.approx(len(written[0]), rel=0.01)


def test_onnx_export_by_torch_export_writes_the_stock_model() -> None:
    pair = Pair()
    programs = [
        torch.onnx.export(one, (pair.ids, pair.mask), dynamo=True, verbose=False) for one in (pair.stock, pair.model)
    ]
    operators = [[node.op_type for node in program.model.graph] for program in programs]
    assert operators[1] == operators[0]


# --- models of no family: single modules


class _Plain(nn.Module):
    """Large enough that every module would run through its kernel."""

    def __init__(self) -> None:
        super().__init__()
        from transformers.activations import GELUActivation

        self.table, self.up, self.down = nn.Embedding(50, 256), nn.Linear(256, 512), nn.Linear(512, 256)
        self.act, self.norm, self.dropout = GELUActivation(), nn.LayerNorm(256), nn.Dropout(0.0)

    def forward(self, ids: Tensor) -> Tensor:
        return self.norm(self.dropout(self.down(self.act(self.up(self.table(ids))))))  # type: ignore[no-any-return]


TRACERS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "torch.export, strict": lambda model, ids: torch.export.export(model, (ids,), strict=True).module(),
    "torch.export": lambda model, ids: torch.export.export(model, (ids,), strict=False).module(),
    "torch.jit.trace": torch.jit.trace,
    "torch.fx.symbolic_trace": lambda model, ids: torch.fx.symbolic_trace(model),
    "make_fx": lambda model, ids: make_fx(model)(ids),
    "torch.func.functional_call": lambda model, ids: (
        lambda ids: functional_call(model, dict(model.named_parameters()), (ids,))
    ),
    "torch.vmap": lambda model, ids: vmap(model),
}


@pytest.mark.parametrize("tracer", TRACERS)
def test_tracers_see_stock_operators_in_any_model(tracer: str) -> None:
    stock = _Plain().eval()
    model, ids = stoker.optimize(copy.deepcopy(stock), dtype=torch.float32), torch.randint(50, (8, 128))
    assert len(stoker.report(model).applied) >= 4
    traced = TRACERS[tracer](model, ids)
    graph = getattr(traced, "graph", None)
    assert "stoker" not in str(graph)
    torch.testing.assert_close(traced(ids), stock(ids), rtol=1e-4, atol=1e-4)


def test_kernels_are_used_again_after_tracing() -> None:
    from torch.profiler import profile

    pair = Pair()
    torch.export.export(pair.model, (), pair.call, strict=False)
    torch.jit.trace(pair.model, example_kwarg_inputs=pair.call, strict=False)
    with profile() as profiled:
        pair.logits(pair.model)
    assert not any(event.key == "aten::scaled_dot_product_attention" for event in profiled.key_averages())
