"""Models with LoRA adapters train as stock peft does, fused where the adapters can be read and by calling them where not."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import tiny_models as tiny
import torch
from torch import nn

import stoker
from stoker.kernels import lora
from stoker.kernels.registry import reference_factors
from stoker.model import layer_program
from stoker.model.adapters import read_linear

peft = pytest.importorskip("peft")

HEAD = "SequenceClassification"
ALL = ["query", "key", "value", "dense"]
TARGETS = {"Bert": ALL, "DistilBert": ["q_lin", "v_lin", "lin1"], "MPNet": ["q", "v", "dense"], "Albert": ALL,
           "ModernBert": ["Wqkv", "Wi", "Wo"], "DebertaV2": ["query_proj", "key_proj", "value_proj", "dense"]}  # fmt: skip


def _stock(family: str = "Bert", head: str = HEAD, targets: list[str] | None = None, **options: Any) -> Any:
    options = {"r": 4, "lora_alpha": 6, "init_lora_weights": False, **options}
    made = tiny.model(family, head)
    return peft.get_peft_model(made, peft.LoraConfig(target_modules=targets or TARGETS[family], **options))


def _add_second(model: Any, targets: list[str]) -> None:
    torch.manual_seed(4)
    model.add_adapter("second", peft.LoraConfig(r=3, target_modules=targets, init_lora_weights=False))
    model.base_model.set_adapter(["default", "second"])


def _optimized(stock: Any) -> Any:
    return stoker.optimize(copy.deepcopy(stock), dtype=torch.float32)


def _read(model: Any) -> int:
    """How many linear layers are read together with their adapters."""
    return sum(count for part, _, count in stoker.report(model).applied if part == "LoRA linear")


def _same_as_stock(stock: Any, model: Any, family: str = "Bert", head: str = HEAD) -> None:
    """Loss and every gradient of a padded batch equal those of stock peft, run example by example."""
    full = tiny.batch(family, head)
    loss, _, gradients = tiny.truth(stock, head, full)
    actual = model(**full.kwargs).loss
    actual.backward()
    torch.testing.assert_close(actual.detach(), loss, rtol=1e-4, atol=1e-5)
    assert all("lora_" in name or "modules_to_save" in name for name in gradients)
    tiny.assert_same_gradients(tiny.gradients(model), gradients)


@pytest.mark.parametrize("head", [HEAD, "QuestionAnswering", "MaskedLM"])
@pytest.mark.parametrize("family", tiny.supported(*TARGETS))
def test_loss_and_gradients_are_those_of_stock_peft(family: str, head: str) -> None:
    stock = _stock(family, head)
    model = _optimized(stock)
    assert _read(model) > 0
    _same_as_stock(stock, model, family, head)


@pytest.mark.parametrize(
    "options",
    [{"r": 1}, {"r": 16}, {"use_rslora": True}, {"targets": ["query"]}, {"targets": ["value", "output.dense"]}],
    ids=str,
)
def test_ranks_scalings_and_choices_of_layers(options: dict[str, Any]) -> None:
    stock = _stock(**options)
    model = _optimized(stock)
    expected = {"query": 2, "value": 6}.get(options.get("targets", [""])[0], 12)
    assert _read(model) == expected
    _same_as_stock(stock, model)


def test_no_module_inside_a_readable_layer_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _optimized(_stock())
    called = []
    stock = peft.tuners.lora.layer.Linear.forward
    monkeypatch.setattr(peft.tuners.lora.layer.Linear, "forward", lambda self, x: called.append(self) or stock(self, x))
    tiny.loss(model, head=HEAD).backward()
    assert set(called) == {model.base_model.model.bert.pooler.dense}


@pytest.mark.parametrize("targets", [ALL, ["query"], ["key", "dense"]], ids=str)
def test_several_active_adapters_are_summed(targets: list[str]) -> None:
    """In some cases layers have one of the adapters only, or none."""
    stock = _stock(targets=["query", "value"])
    _add_second(stock, targets)
    model = _optimized(stock)
    assert _read(model) == {4: 12, 1: 4, 2: 12}[len(targets)]
    _same_as_stock(stock, model)


def test_an_inactive_adapter_adds_nothing_and_can_be_made_active() -> None:
    stock = _stock()
    _add_second(stock, ALL)
    stock.set_adapter("default")
    model = _optimized(stock)
    _same_as_stock(stock, model)
    for one in (stock, model):
        one.set_adapter("second")
        one.zero_grad()
    _same_as_stock(stock, model)


def test_trainable_base_weights_get_their_gradients() -> None:
    stock = _stock(targets=["query", "dense"])
    for name, parameter in stock.named_parameters():
        parameter.requires_grad_("key" in name or "layer.1" in name or parameter.requires_grad)
    model = _optimized(stock)
    full = tiny.batch("Bert", HEAD)
    _, _, gradients = tiny.truth(stock, HEAD, full)
    model(**full.kwargs).loss.backward()
    assert any("base_layer" in name for name in gradients)
    tiny.assert_same_gradients(tiny.gradients(model), gradients)


@pytest.mark.parametrize("options", [{"use_dora": True}, {"lora_bias": True}], ids=str)
def test_variants_are_called(options: dict[str, Any]) -> None:
    stock = _stock(**options)
    model = _optimized(stock)
    assert _read(model) == 0
    _same_as_stock(stock, model)


def test_one_variant_among_the_projections_calls_only_those() -> None:
    stock = _stock(targets=["key", "dense"])
    torch.manual_seed(4)
    stock.add_adapter("second", peft.LoraConfig(r=2, target_modules=["query"], use_dora=True, init_lora_weights=False))
    stock.base_model.set_adapter(["default", "second"])
    model = _optimized(stock)
    assert _read(model) == 2 * 3
    _same_as_stock(stock, model)


def test_disabled_and_merged_adapters_give_what_peft_gives() -> None:
    stock = _stock()
    model = _optimized(stock)
    full = tiny.batch("Bert", HEAD)

    def logits(one: Any) -> torch.Tensor:
        return one(**full.kwargs).logits.detach()

    adapted = logits(model)
    torch.testing.assert_close(adapted, logits(stock), rtol=1e-4, atol=1e-5)
    with model.disable_adapter(), stock.disable_adapter():
        assert _read(model) == 0
        base = logits(model)
        torch.testing.assert_close(base, logits(stock), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(base, adapted, atol=1e-3)
    model.merge_adapter()
    assert _read(model) == 0
    torch.testing.assert_close(logits(model), adapted, rtol=1e-4, atol=1e-5)
    model.unmerge_adapter()
    assert _read(model) == 12
    _same_as_stock(stock, model)


@pytest.mark.parametrize("where", ["", ".base_layer", ".lora_A.default", ".lora_dropout.default"])
def test_hooked_layers_are_called(where: str) -> None:
    model = _optimized(_stock())
    seen: list[Any] = []
    hooked = model.get_submodule(f"base_model.model.bert.encoder.layer.0.intermediate.dense{where}")
    hooked.register_forward_hook(lambda *_: seen.append(1))
    tiny.loss(model, head=HEAD)
    assert len(seen) == 1


def test_adapters_of_a_mixed_batch_are_those_asked_for() -> None:
    stock = _stock()
    _add_second(stock, ["query"])
    model = _optimized(stock)
    stock.eval()
    model.eval()
    names = ["default", "second", "__base__", "default"]
    full = tiny.batch("Bert", HEAD)
    got, want = (one(**full.kwargs, adapter_names=names).logits for one in (model, stock))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


class _Replayed(nn.Module):
    """Dropout with the masks of the given keys."""

    def __init__(self, keys: list[torch.Tensor], p: float) -> None:
        super().__init__()
        self.keys, self.p = keys, p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.numel() // x.shape[-1]
        return x * reference_factors(self.keys.pop(0), rows, x.shape[-1], self.p).view(x.shape)


def test_dropout_of_every_adapter_has_its_own_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock peft with the same masks gives the same loss and gradients. One sequence: rows are the same tokens in both."""
    stock = _stock(lora_dropout=0.3)
    # the pooler is called, and torch would draw its mask
    stock.base_model.model.bert.pooler.dense.lora_dropout["default"] = nn.Identity()
    model = _optimized(stock)
    assert _read(model) == 12
    monkeypatch.setenv(layer_program.SWITCH, "0")  # a layer's program draws its keys itself
    keys: list[torch.Tensor] = []
    draw = lora.draw_key
    monkeypatch.setattr(lora, "draw_key", lambda: keys.append(draw()) or keys[-1])
    full = tiny.batch("Bert", HEAD, lengths=(11,))
    inputs = {name: value[:, :11] for name, value in full.inputs.items()}
    loss = model(**inputs, **full.labels).loss
    loss.backward()
    assert len({int(key) for key in keys}) == 12
    remaining = list(keys)
    for module in stock.modules():
        if isinstance(module, nn.ModuleDict) and isinstance(dict(module.items()).get("default"), nn.Dropout):
            module["default"] = _Replayed(remaining, 0.3)
    want = stock(**inputs, **full.labels).loss
    want.backward()
    assert remaining == []
    torch.testing.assert_close(loss, want, rtol=1e-4, atol=1e-5)
    tiny.assert_same_gradients(tiny.gradients(model), tiny.gradients(stock))


def test_dropout_is_off_in_evaluation_and_follows_the_seed_in_training() -> None:
    stock = _stock(lora_dropout=0.5)
    model = _optimized(stock)

    def logits(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return model(**tiny.batch("Bert", HEAD).kwargs).logits.detach()

    assert torch.equal(logits(1), logits(1))
    assert not torch.allclose(logits(1), logits(2))
    model.eval()
    torch.testing.assert_close(logits(1), logits(2))
    _same_as_stock(stock.eval(), model)


def test_checkpointed_layers_recompute_the_same_masks() -> None:
    model = _optimized(_stock(lora_dropout=0.3))

    def gradients() -> dict[str, torch.Tensor]:
        model.zero_grad()
        torch.manual_seed(5)
        tiny.loss(model, head=HEAD).backward()
        return tiny.gradients(model)

    want = gradients()
    model.base_model.model.gradient_checkpointing_enable({"use_reentrant": False})
    tiny.assert_same_gradients(gradients(), want, 1e-6)


def test_a_base_model_in_bf16_trains_its_fp32_adapters() -> None:
    stock = _stock()
    narrow = copy.deepcopy(stock)
    for name, parameter in narrow.named_parameters():
        if "lora_" not in name:
            parameter.data = parameter.data.bfloat16()
    model = stoker.optimize(narrow)
    full = tiny.batch("Bert", HEAD)
    loss, _, gradients = tiny.truth(stock, HEAD, full)
    actual = model(**full.kwargs).loss
    actual.backward()
    torch.testing.assert_close(actual.detach().float(), loss, rtol=0.05, atol=0.05)
    found = tiny.gradients(model)
    assert found.keys() == gradients.keys()
    assert {one.dtype for one in found.values()} == {torch.float32}
    flat, expected = (torch.cat([one[name].flatten() for name in sorted(gradients)]) for one in (found, gradients))
    assert torch.cosine_similarity(flat, expected, dim=0) > 0.99


def test_fp32_models_with_bf16_activations_train_their_adapters() -> None:
    stock = _stock()
    model = stoker.optimize(copy.deepcopy(stock), dtype=torch.bfloat16)
    full = tiny.batch("Bert", HEAD)
    loss, _, gradients = tiny.truth(stock, HEAD, full)
    actual = model(**full.kwargs).loss
    actual.backward()
    torch.testing.assert_close(actual.detach(), loss, rtol=0.05, atol=0.05)
    assert tiny.gradients(model).keys() == gradients.keys()


def test_a_merged_and_unloaded_model_is_the_one_that_was_trained() -> None:
    model = _optimized(_stock()).eval()
    before = tiny.loss(model, head=HEAD)
    torch.testing.assert_close(tiny.loss(model.merge_and_unload(), head=HEAD), before, rtol=1e-4, atol=1e-5)


def _layer(**options: Any) -> Any:
    stock = _stock(**options)
    return stock.base_model.model.bert.encoder.layer[0].attention.self.query


def test_what_is_read_of_a_layer() -> None:
    layer = _layer(lora_dropout=0.25)
    parts = read_linear(layer)
    assert parts is not None
    assert parts.weight is layer.base_layer.weight
    assert parts.bias is layer.base_layer.bias
    (adapter,) = parts.adapters
    assert adapter.a is layer.lora_A["default"].weight
    assert adapter.b is layer.lora_B["default"].weight
    assert (adapter.scaling, adapter.p) == (1.5, 0.25)
    plain = nn.Linear(3, 4)
    parts = read_linear(plain)
    assert parts is not None
    assert (parts.weight, parts.bias, parts.adapters) == (plain.weight, plain.bias, ())


class _Weight(torch.Tensor):
    """A weight with its own multiplication, as quantized ones are."""


def _changed(layer: Any, change: str) -> None:
    if change == "fan_in_fan_out":
        layer.fan_in_fan_out = True
    elif change == "base layer of another class":
        layer.base_layer = nn.Sequential(layer.base_layer)
    elif change == "quantized weight":
        weight = layer.base_layer.weight.detach().as_subclass(_Weight)
        layer.base_layer.weight = nn.Parameter(weight, requires_grad=False)
    elif change == "fp16 adapter":
        layer.lora_A["default"].half()
    elif change == "another dropout":
        layer.lora_dropout["default"] = nn.AlphaDropout(0.1)
    elif change == "dropout in place":
        layer.lora_dropout["default"] = nn.Dropout(0.1, inplace=True)
    elif change == "scaling by a tensor":
        layer.scaling["default"] = torch.tensor(2.0)
    elif change == "subclass":
        layer.__class__ = type("Linear", (type(layer),), {})
    elif change == "parametrized":
        nn.utils.parametrize.register_parametrization(layer.lora_B["default"], "weight", nn.Identity())
    elif change == "an attribute is missing":
        del layer.lora_variant
    else:
        raise ValueError(change)


@pytest.mark.parametrize(
    "change",
    ["fan_in_fan_out", "base layer of another class", "quantized weight", "fp16 adapter", "another dropout",
     "dropout in place", "scaling by a tensor", "subclass", "parametrized", "an attribute is missing"],
)  # fmt: skip
def test_a_layer_that_computes_something_else_is_not_read(change: str) -> None:
    layer = _layer(lora_dropout=0.1)
    assert read_linear(layer) is not None
    _changed(layer, change)
    assert read_linear(layer) is None
