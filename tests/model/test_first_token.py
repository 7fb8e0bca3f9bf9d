"""Sequence classification reads one token of each row, and the last layer computes no other after attention."""

from __future__ import annotations

import copy

import pytest
import tiny_models as tiny
import torch
from torch import nn

import stoker
from stoker.hf.meter import Work
from stoker.model import layer_parts, layer_program
from stoker.model.heads import FirstTokenModel

HEAD = "SequenceClassification"
FAMILIES = [one for one in tiny.FAMILIES if HEAD in tiny.heads(one)]
SEVERAL_LAYERS = [one for one in FAMILIES if one not in ("Albert", "EuroBert")]
TOKENS, ROWS = 29, 4


@pytest.fixture
def rows_of_last_layer(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each product after attention had, of the layer that was called last, by single operators."""
    seen: dict[nn.Module, list[int]] = {}
    stock = layer_parts.LayerParts.project

    def project(self, path, x, *more, **named):
        seen[self.layer] = [*seen.pop(self.layer, []), x.shape[0]]
        last[:] = seen[self.layer]
        return stock(self, path, x, *more, **named)

    last: list[int] = []
    monkeypatch.setattr(layer_parts.LayerParts, "project", project)
    monkeypatch.setenv(layer_program.SWITCH, "0")  # a program is written once, and then runs without calling this
    return last


def _optimized(family: str, **changes: object) -> tuple[nn.Module, nn.Module]:
    stock = tiny.model(family, HEAD, **changes)
    return stock, stoker.optimize(copy.deepcopy(stock), dtype=torch.float32)


def _assert_same_step(model: nn.Module, stock: nn.Module, full: tiny.Batch) -> None:
    loss, _, gradients = tiny.truth(stock, HEAD, full)
    output = model(**full.kwargs)
    output.loss.backward()
    torch.testing.assert_close(output.loss.detach(), loss, rtol=1e-5, atol=1e-6)
    tiny.assert_same_gradients(tiny.gradients(model), gradients)


@pytest.mark.parametrize("family", SEVERAL_LAYERS)
def test_the_last_layer_computes_the_first_tokens_only(family: str, rows_of_last_layer: list[int]) -> None:
    _, model = _optimized(family)
    tiny.loss(model, family, HEAD)
    assert set(rows_of_last_layer) == {ROWS}
    assert any(part == "first token only" for part, *_ in stoker.report(model).applied)


@pytest.mark.parametrize(
    ("family", "reentrant"),
    [("Bert", True), ("Roberta", False), *[(one, False) for one in tiny.supported("DebertaV2", "ModernBert")]],
)
def test_the_same_with_activation_checkpointing(family: str, reentrant: bool, rows_of_last_layer: list[int]) -> None:
    stock, model = _optimized(family)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    _assert_same_step(model, stock, tiny.batch(family, HEAD))
    tiny.loss(model, family, HEAD)
    assert set(rows_of_last_layer) == {ROWS}


def test_a_row_without_a_token_counts_for_nothing() -> None:
    stock, model = _optimized("Bert")
    full, shorter = (tiny.batch("Bert", HEAD, lengths=lengths) for lengths in ((7, 12, 0, 9), (7, 12, 9)))
    logits = model(**full.inputs).logits
    for row, span in ((0, 7), (1, 12), (3, 9)):
        alone = stock(**{name: value[row : row + 1, :span] for name, value in full.inputs.items()}).logits
        torch.testing.assert_close(logits[row : row + 1], alone, rtol=1e-4, atol=1e-4)
    assert model(**shorter.inputs).logits.shape == (3, 2)


def test_hidden_states_are_complete_if_somebody_wants_them(rows_of_last_layer: list[int]) -> None:
    stock, model = _optimized("Bert")
    full = tiny.batch("Bert", HEAD)
    hidden = model(**full.inputs, output_hidden_states=True).hidden_states[-1]
    assert set(rows_of_last_layer) == {TOKENS}
    real = full.inputs["attention_mask"].bool()
    expected = stock(**full.inputs, output_hidden_states=True).hidden_states[-1]
    torch.testing.assert_close(hidden[real], expected[real], rtol=1e-4, atol=1e-4)


class MeanHead(nn.Module):
    """A head of a user's own, which reads every token."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(tiny.HIDDEN, 2)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.out(features.mean(1))


def test_a_head_that_reads_other_tokens_gets_them() -> None:
    stock = tiny.model("Roberta", HEAD)
    stock.classifier = MeanHead()
    model = stoker.optimize(copy.deepcopy(stock), dtype=torch.float32)
    full = tiny.batch("Roberta", HEAD, lengths=(8, 8))
    full = tiny.Batch({name: value[:, :8] for name, value in full.inputs.items()}, full.labels, full.spans)
    torch.testing.assert_close(model(**full.inputs).logits, stock(**full.inputs).logits, rtol=1e-4, atol=1e-4)
    assert all(part != "first token only" for part, *_ in stoker.report(model).applied)


@pytest.mark.parametrize("where", ["roberta", "classifier", "classifier.dense"])
def test_hooks_see_every_token(where: str, rows_of_last_layer: list[int]) -> None:
    _, model = _optimized("Roberta")
    seen: list[torch.Size] = []
    model.get_submodule(where).register_forward_hook(lambda module, args, output: seen.append(None))
    tiny.loss(model, "Roberta", HEAD)
    assert seen
    assert set(rows_of_last_layer) == {TOKENS}


@pytest.mark.parametrize("family", tiny.supported("ModernBert"))
def test_the_mean_over_tokens_is_over_all_of_them(family: str, rows_of_last_layer: list[int]) -> None:
    stock, model = _optimized(family, classifier_pooling="mean")
    _assert_same_step(model, stock, tiny.batch(family, HEAD))
    assert set(rows_of_last_layer) == {TOKENS}


def test_adapters_and_the_head_that_peft_trains(rows_of_last_layer: list[int]) -> None:
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "dense"])
    stock = peft.get_peft_model(tiny.model("Bert", HEAD), settings)
    for name, parameter in stock.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    model = stoker.optimize(copy.deepcopy(stock), dtype=torch.float32)
    _assert_same_step(model, stock, tiny.batch("Bert", HEAD))
    assert set(rows_of_last_layer) == {ROWS}


def test_what_is_not_computed_is_not_counted_as_work() -> None:
    stock, model = _optimized("Bert")
    full, first = Work.of(stock), Work.of(model)
    after_attention = tiny.HIDDEN * tiny.HIDDEN + 2 * 48 * tiny.HIDDEN
    assert first.per_row == 6.0 * after_attention
    assert full.per_token == first.per_token + first.per_row


def test_restore_gives_the_stock_model_back() -> None:
    _, model = _optimized("Bert")
    assert isinstance(model, FirstTokenModel)
    stoker.restore(model)
    assert not isinstance(model, FirstTokenModel)
