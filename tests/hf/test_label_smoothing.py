"""Label smoothing in the Trainer: transformers' loss, gradients and training, without logits where the head is fused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.trainer_pt_utils import LabelSmoother

import stoker
from hf import tiny
from stoker.hf.label_smoother import labels_follow_for, smoother_for
from stoker.model.label_smoothing import deferred_loss

HEADS = ["LlamaForCausalLM", "Gemma2ForCausalLM", "BertForMaskedLM"]


def _model(head: str) -> Any:
    torch.manual_seed(0)
    config = tiny.tiny_model(dropout=0.0).config
    if head != "BertForMaskedLM":
        shape: dict[str, Any] = {"num_key_value_heads": 1, "head_dim": 16, "pad_token_id": 0}
        if head == "Gemma2ForCausalLM":
            shape["final_logit_softcapping"] = 5.0
        config = getattr(transformers, head).config_class(**{**config.to_diff_dict(), **shape, "model_type": None})
    return getattr(transformers, head)(config)


def _collate(items: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    batch = tiny.pad(items)
    ids = batch["input_ids"]
    labelled = batch["attention_mask"].bool() & (ids % 3 != 0)
    return {**batch, "labels": ids.masked_fill(~labelled, -100)}


@pytest.mark.parametrize("head", HEADS)
def test_the_smoothed_loss_and_its_gradients_are_those_of_transformers(head: str) -> None:
    batch = _collate(list(tiny.TinyData(rows=5)))
    labels = batch.pop("labels")
    shifts, items = head != "BertForMaskedLM", torch.tensor(40)
    stock, ours = _model(head).train(), stoker.optimize(_model(head).train())
    expected = LabelSmoother(0.2)(stock(**batch), labels, shift_labels=shifts, num_items_in_batch=items)
    smoother = smoother_for(LabelSmoother(0.2))
    with labels_follow_for(smoother):
        output = ours(**batch)
    assert deferred_loss(output) is not None
    actual = smoother(output, labels, shift_labels=shifts, num_items_in_batch=items)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    expected.backward()
    actual.backward()
    for (name, mine), theirs in zip(ours.named_parameters(), stock.parameters(), strict=True):
        difference = float((mine.grad - theirs.grad).norm())
        assert difference <= 1e-4 * float(theirs.grad.norm()) + 1e-7, name  # a key's bias has no gradient but rounding
    logits = stock(**batch).logits
    real = batch["attention_mask"].bool()
    torch.testing.assert_close(output.logits[real], logits[real], rtol=1e-4, atol=1e-5)  # still there for who asks
    torch.testing.assert_close(output[0], output.logits)  # no loss comes before it


@pytest.mark.parametrize("head", ["LlamaForCausalLM", "BertForMaskedLM"])
def test_a_trainer_with_label_smoothing_trains_as_transformers_does_and_computes_no_logits(
    tree_path: Path, head: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[int] = []
    histories = []
    for kind in (transformers.Trainer, stoker.Trainer):
        model = _model(head)
        output = model.get_output_embeddings()
        settings: dict[str, Any] = {"label_smoothing_factor": 0.1, "max_steps": 3, "save_strategy": "no"}
        trainer = kind(
            model,
            tiny.arguments(tree_path, gradient_accumulation_steps=2, **settings),
            data_collator=_collate,
            train_dataset=tiny.TinyData(),
        )
        product = nn.functional.linear

        def counted(x: Any, weight: Any, *rest: Any, head_weight: Any = output.weight, stock: Any = product) -> Any:
            if weight is head_weight:
                computed.append(x.shape[0])
            return stock(x, weight, *rest)

        with monkeypatch.context() as patch:
            patch.setattr(nn.functional, "linear", counted)
            trainer.train()
        histories.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
        assert bool(computed) == (kind is transformers.Trainer)
        computed.clear()
    assert histories[1] == pytest.approx(histories[0], rel=1e-4)


def test_models_that_are_not_optimized_get_transformers_own_smoothing() -> None:
    model, smoother = tiny.tiny_model(dropout=0.0), smoother_for(LabelSmoother(0.1))
    batch = tiny.pad(list(tiny.TinyData(rows=3)))
    labels = batch.pop("labels")
    with labels_follow_for(smoother):
        output = model(**batch)
    torch.testing.assert_close(smoother(output, labels), LabelSmoother(0.1)(output, labels))
    assert smoother_for(None) is None
