"""Layers get the sequences of their own batch, whoever calls them, wherever and however often.

By keyword where transformers passes keyword arguments down, by the fallback of `sequences.py` elsewhere.
"""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import tiny_models as tiny
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import stoker
from stoker.model.fused_layer import FusedLayer

HEAD = "SequenceClassification"
OTHER_LENGTHS = (9, 3, 12, 5)


def _pair(family: str, head: str = HEAD) -> tuple[Any, Any]:
    stock = tiny.model(family, head)
    return stock, stoker.optimize(copy.deepcopy(stock), dtype=torch.float32)


def _base(model: Any) -> Any:
    return getattr(model, model.base_model_prefix)


def _stock_calls(model: nn.Module) -> list[str]:
    return [why for what, why in stoker.report(model).left_alone if "call of" in what]


def _assert_trains_as_stock(stock: nn.Module, model: nn.Module, family: str, renamed: str = "") -> None:
    """Loss and gradients of a padded batch with a head that ignores padding."""
    full = tiny.batch(family, HEAD)
    losses = [one(**full.kwargs).loss for one in (stock, model)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-5)
    found = {name.replace(renamed, "") if renamed else name: g for name, g in tiny.gradients(model).items()}
    tiny.assert_same_gradients(found, tiny.gradients(stock), 1e-3)


BY_KEYWORD = [name for name in tiny.FAMILIES if name not in ("MPNet", "RemBert", "DebertaV2")]


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_all_families_but_three_pass_the_keyword_down_in_transformers_5(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers", minversion="5")
    stock, given = FusedLayer.__call__, []

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        given.append("stoker_sequences" in kwargs)
        return stock(self, *args, **kwargs)

    monkeypatch.setattr(FusedLayer, "__call__", call)
    _pair(family)[1](**tiny.batch(family, HEAD).kwargs)
    assert given == [family in BY_KEYWORD] * 2


# --- modules of others between a base model and its layers


class _Encoder(nn.Module):
    """An encoder of one's own that takes keyword arguments and passes none on."""

    def __init__(self, inner: Any, *, mask: bool, checkpointed: bool | None = None) -> None:
        super().__init__()
        self.layer, self.mask, self.reentrant = inner.layer, mask, checkpointed

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

        given = (attention_mask,) if self.mask else ()
        for layer in self.layer:
            if self.reentrant is None:
                output = layer(hidden_states, *given)
            else:
                output = checkpoint(layer, hidden_states, *given, use_reentrant=self.reentrant)
            hidden_states = output[0] if isinstance(output, tuple) else output
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=hidden_states)


@pytest.mark.parametrize("checkpointed", [None, True, False], ids=["plain", "reentrant", "not reentrant"])
@pytest.mark.parametrize("family", ["Bert", "Electra"])
def test_layers_get_their_sequences_from_an_encoder_that_drops_keywords(family: str, checkpointed: bool | None) -> None:
    stock, model = _pair(family)
    for one in (stock, model):
        base = _base(one)
        base.encoder = _Encoder(base.encoder, mask=True, checkpointed=None if one is stock else checkpointed)
    _assert_trains_as_stock(stock, model, family)
    assert _stock_calls(model) == []


def test_layers_get_their_sequences_from_an_encoder_that_drops_the_mask() -> None:
    stock, model = _pair("Bert")
    for one in (stock, model):
        one.bert.encoder = _Encoder(one.bert.encoder, mask=False)
    ids = torch.randint(5, tiny.VOCABULARY, (3, 8))
    torch.testing.assert_close(model(ids).logits, stock(ids).logits, rtol=1e-4, atol=1e-4)
    assert _stock_calls(model) == []


class _Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(lambda *again: self.inner(*again, **kwargs), *args, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("family", tiny.supported("RemBert", "Albert", "DistilBert"))
def test_a_checkpoint_around_layers_recomputes_the_same_sequences(family: str, reentrant: bool) -> None:
    stock, model = _pair(family)
    base = _base(model)
    layers = {
        "RemBert": lambda: base.encoder.layer,
        "Albert": lambda: base.encoder.albert_layer_groups,
        "DistilBert": lambda: base.transformer.layer,
    }[family]()
    for index, layer in enumerate(layers):
        layers[index] = _Checkpointed(layer, reentrant)
    other = model(**tiny.batch(family, HEAD, lengths=OTHER_LENGTHS, seed=2).kwargs).loss  # must not be mixed up
    _assert_trains_as_stock(stock, model, family, ".inner")
    other.backward()
    assert _stock_calls(model) == []


@pytest.mark.parametrize("part", ["layer", "linear"])
def test_compiled_parts_of_a_model_compute_what_stock_computes(part: str) -> None:
    stock, model = _pair("Bert")
    layer = model.bert.encoder.layer[0]
    if part == "layer":
        model.bert.encoder.layer[0] = torch.compile(layer, backend="eager")
    else:
        layer.intermediate.dense = torch.compile(layer.intermediate.dense, backend="eager")
    _assert_trains_as_stock(stock, model, "Bert", "._orig_mod")


# --- several calls at once


@pytest.mark.parametrize("family", tiny.supported("Bert", "MPNet", "RemBert", "DebertaV2"))
@pytest.mark.parametrize("checkpointing", [False, True])
def test_evaluation_between_forward_and_backward_changes_nothing(family: str, checkpointing: bool) -> None:
    if checkpointing and family == "MPNet":
        pytest.skip("MPNet has no activation checkpointing")
    stock, model = _pair(family, "QuestionAnswering")
    full, other = (
        tiny.batch(family, "QuestionAnswering", lengths=lengths) for lengths in ((7, 12, 1, 9), OTHER_LENGTHS)
    )
    _, _, expected = tiny.truth(stock, "QuestionAnswering", full)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    loss = model(**full.kwargs).loss
    with torch.no_grad():
        evaluated = model.eval()(**other.kwargs).loss
    model.train()
    loss.backward()
    tiny.assert_same_gradients(tiny.gradients(model), expected)
    torch.testing.assert_close(evaluated, tiny.truth(stock, "QuestionAnswering", other)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", tiny.supported("Bert", "MPNet", "RemBert"))
def test_threads_can_share_a_model(family: str) -> None:
    head, lengths = "QuestionAnswering", [(7, 12, 1, 9), OTHER_LENGTHS, (2, 2), (12,)]
    _, model = _pair(family, head)
    batches = [tiny.batch(family, head, lengths=some, seed=seed).kwargs for seed, some in enumerate(lengths)]
    with torch.no_grad():
        expected = [model(**batch).loss.item() for batch in batches]
    found: list[list[float]] = [[] for _ in batches]
    start = threading.Barrier(len(batches))

    def run(index: int) -> None:
        start.wait()
        with torch.no_grad():
            for _ in range(10):
                found[index].append(model(**batches[index]).loss.item())

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(batches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for losses, loss in zip(found, expected, strict=True):
        assert losses == pytest.approx([loss] * 10, rel=1e-5)


class _Gate(nn.Module):
    """An activation that runs a whole model of its own, as a layer in the middle of another model's call."""

    def __init__(self, inner: nn.Module, call: dict[str, Tensor]) -> None:
        super().__init__()
        self.inner, self.call = inner, call

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.gelu(x) * self.inner(**self.call).last_hidden_state[:, 0].mean()


@pytest.mark.parametrize("family", tiny.supported("Bert", "RemBert"))
@pytest.mark.parametrize("head", [HEAD, "QuestionAnswering"])
@pytest.mark.parametrize("mask", ["whole", "with a hole"])
def test_a_model_inside_a_model_uses_its_own_sequences(family: str, head: str, mask: str) -> None:
    stock = tiny.model(family, head)
    inner = tiny.batch(family, "Model", lengths=OTHER_LENGTHS, seed=3).inputs
    if mask == "with a hole":  # the inner model then runs as stock, inside one that does not
        inner["attention_mask"][0, 2] = 0
    _base(stock).encoder.layer[0].intermediate.intermediate_act_fn = _Gate(tiny.model(family, seed=1), inner)
    full = tiny.batch(family, head)
    loss, _, gradients = tiny.truth(stock, head, full)
    model = stoker.optimize(copy.deepcopy(stock), dtype=torch.float32)
    found = model(**full.kwargs).loss
    found.backward()
    torch.testing.assert_close(found.detach(), loss, rtol=1e-4, atol=1e-5)
    tiny.assert_same_gradients(tiny.gradients(model), gradients, 1e-3)
    assert _stock_calls(model) == (["the attention mask has holes"] if mask == "with a hole" else [])


def test_layers_called_outside_of_a_base_model_run_as_stock_does() -> None:
    stock, model = _pair("Bert", "QuestionAnswering")
    model(**tiny.batch("Bert", "QuestionAnswering").kwargs).loss.backward()
    hidden = torch.randn(3, 6, tiny.HIDDEN)
    for path in ("bert.encoder.layer.0", "bert.encoder", "qa_outputs"):
        found, expected = (one.get_submodule(path)(hidden) for one in (model, stock))
        if not isinstance(found, Tensor):
            found, expected = found[0], expected[0]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", tiny.supported("Bert", "RemBert"))
def test_ddp_with_activation_checkpointing_computes_the_same_gradients(family: str, tmp_path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        stock, model = _pair(family)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        _assert_trains_as_stock(stock, nn.parallel.DistributedDataParallel(model), family, "module.")
    finally:
        torch.distributed.destroy_process_group()
