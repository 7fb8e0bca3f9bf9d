"""Models outside of the table run without padding where a trial shows that they can, and as stock where they cannot."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import tiny_decoders as tiny
import torch
import transformers
from tiny_models import assert_same_gradients, gradients
from torch import nn

import stoker
from stoker.model.sequences import Positions, counting

pytestmark = pytest.mark.skipif(
    int(transformers.__version__.split(".")[0]) < 5, reason="the interface of transformers 5"
)

_BERT_LIKE = {**tiny._COMMON, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_OPT = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "ffn_dim": 48,
    "max_position_embeddings": 64,
    "word_embed_proj_dim": 32,
    "dropout": 0.0,
}
PACKED = {
    "SmolLM3": lambda: transformers.SmolLM3Config(**tiny._GROUPED),
    "Granite": lambda: transformers.GraniteConfig(**tiny._GROUPED),
    "Mixtral": lambda: transformers.MixtralConfig(**tiny._GROUPED, num_local_experts=2),
    "OPT": lambda: transformers.OPTConfig(**_OPT),
    "Ernie": lambda: transformers.ErnieConfig(**_BERT_LIKE),
}
AS_STOCK = {
    "StableLm": (lambda: transformers.StableLmConfig(**tiny._GROUPED), "do not pass keyword arguments on to attention"),
    "Data2VecText": (lambda: transformers.Data2VecTextConfig(**_BERT_LIKE), "other results for packed rows"),
}


def _model(config: Any) -> nn.Module:
    torch.manual_seed(0)
    return tiny.shaken(transformers.AutoModel.from_config(config))


def _compare(stock: nn.Module, model: nn.Module) -> None:
    padded = tiny.batch()
    inputs = {name: padded[name] for name in ("input_ids", "attention_mask")}
    real = padded["attention_mask"].bool()
    rows = []
    for made in (stock, model):
        hidden = made(**inputs).last_hidden_state[real]
        hidden.square().sum().backward()
        rows.append(hidden.detach())
    torch.testing.assert_close(rows[1], rows[0], rtol=1e-4, atol=1e-4)
    assert_same_gradients(gradients(model), gradients(stock))


@pytest.mark.parametrize("name", PACKED)
def test_a_model_outside_the_table_runs_without_padding(name: str) -> None:
    stock = _model(PACKED[name]())
    model = stoker.optimize(copy.deepcopy(stock))
    _compare(stock, model)
    report = str(stoker.report(model))
    assert "padding-free base model" in report
    assert "a call of" not in report


COMMON_HEAD = {
    "SmolLM3": lambda: transformers.SmolLM3Config(**tiny._GROUPED),
    "Gemma": lambda: transformers.GemmaConfig(**tiny._GROUPED, head_dim=8),
    "Phi": lambda: transformers.PhiConfig(**tiny._GROUPED),  # its head has a bias
}


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", COMMON_HEAD)
def test_a_head_like_llamas_scores_labelled_tokens_only(name: str, side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    stock = tiny.shaken(transformers.AutoModelForCausalLM.from_config(COMMON_HEAD[name]()))
    padded = tiny.batch(side)
    loss, logits, expected = tiny.truth(stock, padded)
    model = stoker.optimize(copy.deepcopy(stock))
    with monkeypatch.context() as patched:
        patched.setattr("stoker.model.causal_lm._logits", lambda *_: pytest.fail("logits were computed"))
        output = model(**padded)
        output.loss.backward()
    torch.testing.assert_close(output.loss.detach(), loss, rtol=1e-5, atol=1e-6)
    rows = output.logits[padded["attention_mask"].bool()].detach()
    torch.testing.assert_close(rows, torch.cat([row[0] for row in logits]), rtol=1e-4, atol=1e-4)
    assert_same_gradients(gradients(model), expected)
    report = str(stoker.report(model))
    assert "language-model loss" in report
    assert "padding-free base model" in report


def test_another_head_is_called() -> None:
    config = transformers.GraniteConfig(**tiny._GROUPED, logits_scaling=4.0)
    stock = tiny.shaken(transformers.AutoModelForCausalLM.from_config(config))
    padded = tiny.batch()
    loss, _, expected = tiny.truth(stock, padded)
    model = stoker.optimize(copy.deepcopy(stock))
    result = model(**padded).loss
    result.backward()
    torch.testing.assert_close(result.detach(), loss, rtol=1e-5, atol=1e-6)
    assert_same_gradients(gradients(model), expected)
    assert "language-model loss" not in str(stoker.report(model))


def test_only_real_tokens_are_computed() -> None:
    model = stoker.optimize(_model(PACKED["SmolLM3"]()))
    padded = tiny.batch()
    inputs = {name: padded[name] for name in ("input_ids", "attention_mask")}
    model(**inputs)  # the trial
    positions = Positions()
    with counting(positions):
        model(**inputs)
    assert positions.computed == sum(tiny.LENGTHS)
    assert positions.given == padded["input_ids"].numel()


@pytest.mark.parametrize("name", AS_STOCK)
def test_a_model_that_cannot_be_packed_runs_as_stock_and_says_why(name: str, caplog: pytest.LogCaptureFixture) -> None:
    config, reason = AS_STOCK[name]
    stock = _model(config())
    model = stoker.optimize(copy.deepcopy(stock))
    _compare(stock, model)
    assert reason in caplog.text
    assert reason in str(stoker.report(model))


def test_a_model_that_mixes_tokens_otherwise_is_left_alone() -> None:
    model = stoker.optimize(_model(transformers.MambaConfig(vocab_size=99, hidden_size=32, num_hidden_layers=1)))
    assert "padding-free base model" not in str(stoker.report(model))


def test_restore_gives_the_attention_implementation_back() -> None:
    model = stoker.optimize(_model(PACKED["SmolLM3"]()))
    assert model.config._attn_implementation == "stoker"
    stoker.restore(model)
    assert model.config._attn_implementation == "sdpa"


def test_an_attention_implementation_that_the_user_chose_stays() -> None:
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(PACKED["SmolLM3"](), attn_implementation="eager")
    stoker.optimize(model)
    assert model.config._attn_implementation == "eager"
    assert "was chosen by the user" in str(stoker.report(model))


def test_dropout_and_training_mode_survive_the_trial() -> None:
    model = stoker.optimize(_model(PACKED["OPT"]()))
    model.decoder.layers[0].eval()
    padded = tiny.batch()
    model(input_ids=padded["input_ids"], attention_mask=padded["attention_mask"])
    assert model.training
    assert not model.decoder.layers[0].training
    assert model.decoder.layers[1].training


@pytest.mark.parametrize("checkpointing", [False, True])
def test_activation_checkpointing_keeps_the_sequences(checkpointing: bool) -> None:
    stock = _model(PACKED["SmolLM3"]())
    model = stoker.optimize(copy.deepcopy(stock))
    if checkpointing:
        model.gradient_checkpointing_enable()
    _compare(stock, model)


def test_bf16_applies_to_a_model_outside_the_table() -> None:
    model = stoker.optimize(_model(PACKED["SmolLM3"]()), dtype=torch.bfloat16)
    padded = tiny.batch()
    output = model(input_ids=padded["input_ids"], attention_mask=padded["attention_mask"])
    assert output.last_hidden_state.dtype == torch.float32
    exact = stoker.restore(model)(input_ids=padded["input_ids"], attention_mask=padded["attention_mask"])
    real = padded["attention_mask"].bool()
    error = (output.last_hidden_state - exact.last_hidden_state)[real].norm() / exact.last_hidden_state[real].norm()
    assert 0.0 < float(error.detach()) < 0.05
