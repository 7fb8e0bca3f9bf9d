"""Language models: dropout off, loss, logits and every gradient are those of stock, example by example without padding."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import tiny_decoders as tiny
import torch
import transformers
from tiny_models import assert_same_gradients, gradients
from torch import nn

import stoker

pytestmark = pytest.mark.skipif(int(transformers.__version__.split(".")[0]) < 5, reason="the rows need transformers 5")
FAMILIES = list(tiny.CONFIGS)


def _compare(stock: nn.Module, inputs: dict[str, Any], padded: dict[str, torch.Tensor], **switches: Any) -> nn.Module:
    loss, logits, expected = tiny.truth(stock, padded)
    model = stoker.optimize(copy.deepcopy(stock), **switches)
    output = model(**inputs)
    output.loss.backward()
    torch.testing.assert_close(output.loss.detach(), loss, rtol=1e-5, atol=1e-6)
    real = padded["attention_mask"].bool()
    rows = output.logits[real] if output.logits.shape[:2] == real.shape else output.logits[0]
    torch.testing.assert_close(rows.detach(), torch.cat([row[0] for row in logits]), rtol=1e-4, atol=1e-4)
    assert_same_gradients(gradients(model), expected)
    return model


@pytest.mark.parametrize("side", ["right", "left", "both"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_padded_batch_gives_what_its_examples_give_one_by_one(family: str, side: str) -> None:
    padded = tiny.batch(side)
    model = _compare(tiny.model(family), padded, padded)
    report = str(stoker.report(model))
    assert "padding-free base model" in report
    assert "fused layer" in report
    assert "language-model loss" in report
    assert "a call of" not in report


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_that_was_flattened_before_the_model_gives_the_same(family: str) -> None:
    padded = tiny.batch()
    _compare(tiny.model(family), tiny.flattened(padded), padded)


@pytest.mark.parametrize("flat", [False, True], ids=["padded", "flattened"])
@pytest.mark.parametrize("family", FAMILIES)
def test_lora_on_every_linear_layer_gives_what_stock_gives(family: str, flat: bool) -> None:
    peft = pytest.importorskip("peft")
    options = {"r": 3, "lora_alpha": 5, "target_modules": "all-linear", "init_lora_weights": False}
    stock = peft.get_peft_model(tiny.model(family), peft.LoraConfig(task_type="CAUSAL_LM", **options))
    padded = tiny.batch("left")
    model = _compare(stock, tiny.flattened(padded) if flat else padded, padded)
    parts = {part: count for part, _, count in stoker.report(model).applied}
    adapted = sum(name.endswith("lora_A") for name, _ in stock.named_modules())
    assert parts["fused layer"] == 2
    assert parts["LoRA linear"] == adapted > 0
    assert all(parameter.grad is None for name, parameter in model.named_parameters() if "lora_" not in name)


def test_cumulative_lengths_tell_sequences_apart_too() -> None:
    padded = tiny.batch()
    flat = tiny.flattened(padded)
    ends = torch.tensor([0, *tiny.LENGTHS]).cumsum(0).int()
    _compare(tiny.model("Llama"), {**flat, "cu_seq_lens_q": ends, "cu_seq_lens_k": ends}, padded)


@pytest.mark.parametrize("switches", [{"fuse": False}, {"fuse_loss": False}, {"unpad": False}], ids=str)
@pytest.mark.parametrize("family", ["Llama", "Gemma2", "GPT2", "Olmo2"])
def test_results_stay_the_same_if_one_part_is_switched_off(family: str, switches: dict[str, bool]) -> None:
    padded = tiny.batch()
    _compare(tiny.model(family), padded, padded, **switches)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("family", ["Llama", "Gemma3", "GPT2"])
def test_activation_checkpointing_changes_nothing(family: str, reentrant: bool) -> None:
    padded = tiny.batch()
    loss, _, expected = tiny.truth(tiny.model(family), padded)
    model = stoker.optimize(tiny.model(family))
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    output = model(**padded)
    output.loss.backward()
    torch.testing.assert_close(output.loss.detach(), loss, rtol=1e-5, atol=1e-6)
    assert_same_gradients(gradients(model), expected)


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Gemma2", "GPTNeoX"])
def test_bf16_gives_the_loss_and_gradients_of_fp32_within_its_precision(family: str) -> None:
    padded = tiny.batch()
    loss, _, expected = tiny.truth(tiny.model(family), padded)
    model = stoker.optimize(tiny.model(family), dtype=torch.bfloat16)
    output = model(**padded)
    output.loss.backward()
    assert output.loss.dtype == torch.float32
    torch.testing.assert_close(output.loss.detach(), loss, rtol=0.02, atol=0.02)
    actual = gradients(model)
    together = torch.cat([(actual[name] - expected[name]).flatten() for name in expected]).norm()
    assert float(together) < 0.06 * float(torch.cat([g.flatten() for g in expected.values()]).norm())


@pytest.mark.parametrize("family", FAMILIES)
def test_generation_with_a_cache_is_stocks(family: str) -> None:
    stock = tiny.model(family).eval()
    model = stoker.optimize(copy.deepcopy(stock))
    prompt = torch.tensor([[5, 9, 23, 41]])
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(prompt, **options), stock.generate(prompt, **options))


def test_evaluation_skips_padding_too_and_an_explicit_cache_is_returned() -> None:
    stock = tiny.model("Llama").eval()
    model = stoker.optimize(copy.deepcopy(stock))
    padded = tiny.batch()
    with torch.no_grad():
        expected, actual = (made(**padded) for made in (stock, model))
        torch.testing.assert_close(actual.loss, expected.loss, rtol=1e-5, atol=1e-6)
        cached = model(input_ids=padded["input_ids"][1:2, :12], use_cache=True)
    assert cached.past_key_values.get_seq_length() == 12
    assert "a call of LlamaModel: a cache is requested" in str(stoker.report(model))


def test_a_training_step_computes_no_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    model = stoker.optimize(tiny.model("Llama"))
    monkeypatch.setattr(type(model.lm_head), "forward", lambda *_: pytest.fail("the head was called"))
    output = model(**tiny.batch())
    output.loss.backward()
    assert model.lm_head.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("items", [40, torch.tensor(40)])
def test_the_loss_is_divided_by_the_items_that_a_trainer_counts(items: Any) -> None:
    stock, padded = tiny.model("Llama"), tiny.batch()
    model = stoker.optimize(copy.deepcopy(stock))
    actual, expected = (made(**padded, num_items_in_batch=items).loss for made in (model, stock))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def test_labels_that_were_shifted_before_are_used_as_they_are() -> None:
    stock, padded = tiny.model("Llama"), tiny.batch()
    shifted = nn.functional.pad(padded["labels"], (0, 1), value=-100)[:, 1:].contiguous()
    model = stoker.optimize(copy.deepcopy(stock))
    actual, expected = (made(**padded, shift_labels=shifted).loss for made in (model, stock))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def test_labels_at_padding_are_ignored_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    stock, padded = tiny.model("Llama"), tiny.batch()
    loss, *_ = tiny.truth(stock, padded)
    model = stoker.optimize(stock)
    unmasked = padded["labels"].masked_fill(padded["attention_mask"] == 0, 7)
    with caplog.at_level(logging.WARNING, "stoker"):
        for _ in range(2):
            output = model(**{**padded, "labels": unmasked})
    torch.testing.assert_close(output.loss.detach(), loss, rtol=1e-5, atol=1e-6)
    assert sum("labels at padding are ignored" in record.message for record in caplog.records) == 1


def test_a_batch_without_labelled_tokens_gives_zero_gradients() -> None:
    model, padded = stoker.optimize(tiny.model("Llama")), tiny.batch()
    output = model(**{**padded, "labels": torch.full_like(padded["labels"], -100)}, num_items_in_batch=5)
    output.loss.backward()
    assert float(output.loss.detach()) == 0.0
    assert all(float(gradient.abs().sum()) == 0.0 for gradient in gradients(model).values())


def test_a_loss_function_of_the_users_own_is_called() -> None:
    model = stoker.optimize(tiny.model("Llama"))
    model.loss_function = lambda logits, labels, vocab_size, **_: logits.sum() * 0.0 + 42.0
    assert float(model(**tiny.batch()).loss.detach()) == 42.0


@pytest.mark.parametrize("family", ["Llama", "Gemma2", "GPT2"])
def test_a_classifier_on_a_language_model_reads_the_last_real_token(family: str) -> None:
    stock = tiny.model(family, auto=transformers.AutoModelForSequenceClassification)
    stock.config.pad_token_id = 0
    model = stoker.optimize(copy.deepcopy(stock))
    padded = tiny.batch()
    inputs = {name: padded[name] for name in ("input_ids", "attention_mask")}
    labels = torch.tensor([0, 1, 1, 0])
    expected, actual = (made(**inputs, labels=labels) for made in (stock, model))
    torch.testing.assert_close(actual.logits, expected.logits, rtol=1e-4, atol=1e-4)
    for output in (expected, actual):
        output.loss.backward()
    assert_same_gradients(gradients(model), gradients(stock))


@pytest.mark.parametrize("family", ["GPT2", "Phi3", "GPTNeoX"])
def test_dropout_keeps_the_mean_and_is_off_in_evaluation(family: str) -> None:
    model = stoker.optimize(tiny.model(family, dropout=0.2))
    padded = tiny.batch()
    inputs = {name: padded[name] for name in ("input_ids", "attention_mask")}
    stock = tiny.model(family, dropout=0.2)
    real = padded["attention_mask"].bool()
    means = []
    with torch.no_grad():
        for made in (model, stock):
            torch.manual_seed(3)
            draws = torch.stack([made(**inputs, use_cache=False).logits[real] for _ in range(150)])
            assert float((draws[0] - draws[1]).abs().max()) > 0.0
            means.append((draws.mean(0), draws.std(0)))
        (actual, spread), (expected, stock_spread) = means
        # the error of a difference of two means, averaged over all logits, with a factor of safety
        assert float((actual - expected).abs().mean()) < 2.0 * float(spread.mean()) * (2 / 150) ** 0.5
        assert 0.8 < float(spread.mean() / stock_spread.mean()) < 1.25
        model.eval()
        assert torch.equal(model(**inputs).logits, model(**inputs).logits)
