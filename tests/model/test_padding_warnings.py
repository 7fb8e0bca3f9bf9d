"""Hidden states at padding are zeros: a loss that uses them causes one warning, and `unpad=False` gives the values of stock."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import tiny_models as tiny
import torch
from torch import Tensor, nn

import stoker
from stoker.model.class_swap import Optimized


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "unpad=False" in record.getMessage()]


def _distance(one: nn.Module, teacher: Tensor, call: dict[str, Any]) -> Tensor:
    """Distillation that forgets the mask."""
    return nn.functional.mse_loss(one(**call).last_hidden_state, teacher)


def test_distillation_without_a_mask_causes_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    stock, call = tiny.model("Bert"), tiny.batch("Bert", "SequenceClassification").inputs
    with torch.no_grad():
        teacher = tiny.model("Bert", seed=1)(**call).last_hidden_state
    model = stoker.optimize(copy.deepcopy(stock))
    for _ in range(2):
        _distance(model, teacher, call).backward()
    (warned,) = _warnings(caplog)
    assert warned == (
        "BertModel: the loss depends on hidden states at padding; at padding they are zeros, where stock transformers has "
        "values; apply the attention mask, or keep padding with stoker.optimize(model, unpad=False) (logged once)"
    )
    kept = stoker.optimize(copy.deepcopy(stock), unpad=False)
    torch.testing.assert_close(_distance(kept, teacher, call), _distance(stock, teacher, call), rtol=1e-4, atol=1e-5)
    _distance(kept, teacher, call).backward()
    assert len(_warnings(caplog)) == 1


def test_a_mean_over_all_positions_causes_a_warning_and_a_masked_one_does_not(caplog: pytest.LogCaptureFixture) -> None:
    call = tiny.batch("Bert", "SequenceClassification", "both").inputs
    masked = stoker.optimize(tiny.model("Bert"))
    mask = call["attention_mask"].unsqueeze(-1)
    for _ in range(2):
        hidden = masked(**call).last_hidden_state
        ((hidden * mask).sum(1) / mask.sum(1)).square().sum().backward()  # as sentence-transformers pools
        masked(**call).pooler_output.sum().backward()
        masked(**call).last_hidden_state[:, 0].sum().backward()
    assert _warnings(caplog) == []
    stoker.optimize(tiny.model("Bert"))(**call).last_hidden_state.mean(1).square().sum().backward()
    assert len(_warnings(caplog)) == 1


@pytest.mark.parametrize("head", tiny.HEADS)
@pytest.mark.parametrize("family", ["Bert", "DistilBert", "ModernBert"])
def test_heads_of_transformers_cause_no_warning(family: str, head: str, caplog: pytest.LogCaptureFixture) -> None:
    model = stoker.optimize(tiny.model(family, head))
    stock_loss = stoker.optimize(tiny.model(family, head), fuse_loss=False)
    for one in (model, stock_loss):
        one(**tiny.batch(family, head, "both").kwargs).loss.backward()
    assert _warnings(caplog) == []


def test_output_hidden_states_causes_a_warning_if_there_is_padding(caplog: pytest.LogCaptureFixture) -> None:
    head = "SequenceClassification"
    model, full = stoker.optimize(tiny.model("Bert", head)), tiny.batch("Bert", head)
    whole = {name: value for name, value in full.kwargs.items() if name != "attention_mask"}
    model(**whole, output_hidden_states=True)
    assert _warnings(caplog) == []
    with torch.no_grad():
        for _ in range(2):
            model(**full.kwargs, output_hidden_states=True)
    (warned,) = _warnings(caplog)
    assert warned.startswith("BertModel: it returns hidden_states; at padding they are zeros")


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_unpad_false_gives_the_values_of_stock_at_padding_too(family: str, side: str) -> None:
    head = tiny.token_head(family)
    stock = tiny.model(family, head)
    model = stoker.optimize(copy.deepcopy(stock), unpad=False)
    full = tiny.batch(family, head, side)
    outputs = []
    for one in (stock, model):
        outputs.append(one(**full.kwargs, output_hidden_states=True))
        outputs[-1].loss.backward()  # at once: RemBERT clamps the labels in place
    for name in ("loss", "start_logits" if head == "QuestionAnswering" else "logits", "hidden_states"):
        torch.testing.assert_close(outputs[1][name], outputs[0][name], rtol=1e-4, atol=1e-4)
    tiny.assert_same_gradients(tiny.gradients(model), tiny.gradients(stock), 1e-3)


def test_unpad_false_uses_the_requested_precision() -> None:
    stock, call = tiny.model("Bert"), tiny.batch("Bert", "SequenceClassification").inputs
    expected = stock(**call).last_hidden_state
    half = stoker.optimize(copy.deepcopy(stock), unpad=False, dtype=torch.bfloat16)(**call, output_hidden_states=True)
    assert half.last_hidden_state.dtype == half.pooler_output.dtype == half.hidden_states[0].dtype == torch.float32
    error = float((half.last_hidden_state - expected).abs().max())
    assert 1e-5 < error < 0.2, "bf16 was asked for"
    whole = stoker.optimize(copy.deepcopy(stock), unpad=False, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(whole(**call).last_hidden_state, expected, rtol=1e-4, atol=1e-4)


def test_the_trainer_keeps_the_switches_of_an_already_optimized_model(tree_path: Path) -> None:
    from hf import tiny as trained

    model = stoker.optimize(trained.tiny_model(), unpad=False, fuse_loss=False)
    trainer = trained.trainer(tree_path, model=model, max_steps=1, save_strategy="no")
    trainer.train()
    settings = next(module.stoker_settings for module in model.modules() if isinstance(module, Optimized))
    assert (settings.unpad, settings.fuse, settings.fuse_loss) == (False, True, False)
    assert trainer.state.log_history[0]["padding_avoided"] == 0.0
