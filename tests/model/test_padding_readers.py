"""A loss that reads hidden states at padding gets those of stock from the first step on; for others they are not computed."""

from __future__ import annotations

import copy
import logging
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_models as tiny
import torch
import transformers
from torch import Tensor, nn

import stoker
from stoker.model.class_swap import Optimized
from stoker.model.padding_readers import PaddingRead

Loss = Callable[[nn.Module, dict[str, Any]], Tensor]


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    texts = (record.getMessage() for record in caplog.records if record.name == "stoker")
    return [text for text in texts if "hidden states" in text or "hidden_states" in text]


def _all_positions(model: nn.Module, call: dict[str, Any]) -> Tensor:
    """Forgets the mask."""
    return model(**call).last_hidden_state.mean(1).square().sum()


def _real_tokens(model: nn.Module, call: dict[str, Any]) -> Tensor:
    """As sentence-transformers pools."""
    mask = call["attention_mask"].unsqueeze(-1)
    return ((model(**call).last_hidden_state * mask).sum(1) / mask.sum(1)).square().sum()


def _some_layers(model: nn.Module, call: dict[str, Any]) -> Tensor:
    states = model(**call, output_hidden_states=True).hidden_states
    return states[0].mean(1).square().sum() + states[1].mean(1).square().sum()


def _trained(model: nn.Module, loss: Loss, call: dict[str, Any], steps: int = 4) -> list[float]:
    """The losses of a training loop."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=1e-3), []
    for _ in range(steps):
        value = loss(model, call)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    return losses


def _call(family: str = "Bert", side: str = "right") -> dict[str, Any]:
    return tiny.batch(family, "SequenceClassification", side).inputs


@pytest.mark.parametrize("loss", [_all_positions, _some_layers])
@pytest.mark.parametrize("family", ["Bert", "ModernBert"])
def test_a_loss_that_reads_padding_learns_as_in_stock(family: str, loss: Loss) -> None:
    stock = tiny.model(family)
    model = stoker.optimize(copy.deepcopy(stock))
    assert _trained(model, loss, _call(family)) == pytest.approx(_trained(stock, loss, _call(family)), rel=1e-5)
    tiny.assert_same_gradients(dict(model.named_parameters()), dict(stock.named_parameters()), 1e-5)


@pytest.mark.parametrize("checkpoints", [False, True])
def test_the_first_step_of_such_a_loss_has_the_gradients_of_stock(checkpoints: bool) -> None:
    stock = tiny.model("Bert")
    model = stoker.optimize(copy.deepcopy(stock))
    if checkpoints:
        model.gradient_checkpointing_enable()
    for one in (stock, model):
        _all_positions(one, _call()).backward()
    tiny.assert_same_gradients(tiny.gradients(model), tiny.gradients(stock))


def test_a_model_outside_of_the_table_gets_values_of_stock_attention() -> None:
    sizes = {**tiny._COMMON, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    stock, call = transformers.ErnieModel(transformers.ErnieConfig(**sizes)).train(), _call()
    model = stoker.optimize(copy.deepcopy(stock))
    assert _trained(model, _all_positions, call) == pytest.approx(_trained(stock, _all_positions, call), rel=1e-5)


def test_such_a_loss_under_autocast_is_near_that_of_stock() -> None:
    stock = tiny.model("Bert")
    model = stoker.optimize(copy.deepcopy(stock))

    def loss(one: nn.Module, call: dict[str, Any]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return _all_positions(one, call)

    assert _trained(model, loss, _call()) == pytest.approx(_trained(stock, loss, _call()), rel=2e-2)


def test_the_warning_about_read_padding_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    _trained(stoker.optimize(tiny.model("Bert")), _all_positions, _call())
    assert _warnings(caplog) == [
        "BertModel: this call runs as stock transformers does, because the loss reads hidden states at padding (logged once)"
    ]


def test_the_warning_is_not_appended_to_a_progress_bar(capsys: pytest.CaptureFixture[str]) -> None:
    from tqdm import tqdm

    handler = logging.StreamHandler(sys.stderr)
    logging.getLogger("stoker").addHandler(handler)
    model = stoker.optimize(tiny.model("Bert"))
    for _ in tqdm(range(3)):
        _all_positions(model, _call()).backward()
    (line,) = [line for line in re.split(r"[\r\n]", capsys.readouterr().err) if "reads hidden states" in line]
    assert line.startswith("BertModel: ")


def test_padding_that_nobody_reads_is_computed_for_two_steps_only(caplog: pytest.LogCaptureFixture) -> None:
    model, call = stoker.optimize(tiny.model("Bert")), _call()
    padding = call["attention_mask"] == 0
    computed = []
    for _ in range(4):
        hidden = model(**call).last_hidden_state
        computed.append(bool(hidden[padding].any()))
        hidden[:, 0].sum().backward()
    assert computed == [True, True, False, False]
    assert _warnings(caplog) == []


def test_a_loss_that_ignores_padding_has_the_same_gradients_in_all_steps() -> None:
    model, gradients = stoker.optimize(tiny.model("Bert")), []
    for _ in range(3):
        _real_tokens(model, _call()).backward()
        gradients.append(tiny.gradients(model))
        model.zero_grad()
    for later in gradients[1:]:
        tiny.assert_same_gradients(later, gradients[0], 1e-6)


def test_random_numbers_do_not_depend_on_whether_padding_is_computed() -> None:
    model, call = stoker.optimize(tiny.model("Bert", dropout=0.1)), _call()
    real, seen = call["attention_mask"].bool(), []
    for _ in range(3):
        torch.manual_seed(0)
        hidden = model(**call).last_hidden_state
        seen.append((hidden[real].detach(), torch.rand(1)))
        hidden[:, 0].sum().backward()
    for later in seen[1:]:
        torch.testing.assert_close(later, seen[0], rtol=0, atol=0)


def test_a_loss_that_begins_to_read_padding_later_ends_the_step() -> None:
    stock = tiny.model("Bert")
    model = stoker.optimize(copy.deepcopy(stock))
    _trained(model, _real_tokens, _call())
    _trained(stock, _real_tokens, _call())
    with pytest.raises(PaddingRead, match=r"BertModel: the loss has begun to read hidden states at padding.*repeat it"):
        _all_positions(model, _call()).backward()
    model.zero_grad()
    assert _trained(model, _all_positions, _call()) == pytest.approx(_trained(stock, _all_positions, _call()), rel=1e-5)


def test_the_trainer_repeats_the_step_that_began_to_read_padding(tree_path: Path) -> None:
    from hf import tiny as trained

    def losses(model: nn.Module, name: str) -> list[float]:
        steps = iter(range(99))

        def loss(outputs: Any, labels: Tensor, **_: Any) -> Tensor:
            read = outputs.hidden_states[1].mean(1).square().sum() if next(steps) > 3 else 0.0
            return outputs.logits.square().sum() + read

        arguments = trained.arguments(tree_path / name, max_steps=6)
        rows = {"train_dataset": trained.TinyData(), "data_collator": trained.pad}
        trainer = stoker.Trainer(model, arguments, compute_loss_func=loss, **rows)
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    model = trained.tiny_model(dropout=0.0)
    model.config.output_hidden_states = True
    expected = losses(stoker.optimize(copy.deepcopy(model), unpad=False), "stock")
    assert losses(model, "ours") == pytest.approx(expected, rel=1e-3)


def test_a_frozen_model_returns_values_of_stock_to_a_trained_reader() -> None:
    stock, call = tiny.model("Bert").requires_grad_(False), _call()
    model, head = stoker.optimize(copy.deepcopy(stock)), nn.Linear(tiny.HIDDEN, 1)
    for _ in range(4):
        values = [head(one(**call).last_hidden_state).sum() for one in (model, stock)]
        torch.testing.assert_close(*values, rtol=1e-4, atol=1e-4)
        values[0].backward()


def test_evaluation_does_not_compute_padding() -> None:
    model, call = stoker.optimize(tiny.model("Bert")).eval(), _call()
    with torch.no_grad():
        assert not model(**call).last_hidden_state[call["attention_mask"] == 0].any()


# --- Masked positions that hold tokens


def test_tokens_at_masked_positions_are_computed_as_in_stock_without_gradients_too() -> None:
    stock, call = tiny.model("Bert").eval(), _call()
    call["input_ids"] = call["input_ids"].masked_fill(call["attention_mask"] == 0, 4)
    model = stoker.optimize(copy.deepcopy(stock))
    with torch.no_grad():
        states = [one(**call).last_hidden_state for one in (model, stock)]
    torch.testing.assert_close(*states, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cached", [False, True])
def test_multi_vector_encoders_with_query_expansion_learn_as_in_stock(
    tmp_path: Path, cached: bool, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("sentence_transformers", minversion="6.2", reason="needs the extra embed")
    stock = _multi_vector_encoder(tmp_path)
    model = copy.deepcopy(stock)
    stoker.optimize(model)
    scores = [_scores(one) for one in (model, stock)]
    torch.testing.assert_close(*scores, rtol=1e-4, atol=1e-4)
    assert _steps(model, cached) == pytest.approx(_steps(stock, cached), rel=1e-5)
    torch.testing.assert_close(_scores(model), _scores(stock), rtol=1e-4, atol=1e-4)
    assert [text.partition("because ")[2] for text in _warnings(caplog)] == [
        "masked positions hold tokens, whose hidden states may be read (logged once)",
        "the loss reads hidden states at masked positions that hold tokens (logged once)",
    ]


QUERIES = ["a green river", "who founded the town", "an old chronicle"]
DOCUMENTS = ["The river is green in spring, and brown in autumn.", "Ane did.", "The oldest one says so."]


def _multi_vector_encoder(folder: Path) -> Any:
    from sentence_transformers import MultiVectorEncoder
    from sentence_transformers.base.modules import Normalize, Transformer
    from sentence_transformers.base.modules.dense import Dense
    from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask

    from tasks.models import save_tiny_bert

    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    expansion: Any = {"strategy": "fixed", "length": 12}
    encoder = Transformer(str(save_tiny_bert(folder)), config_kwargs=no_dropout, query_expansion=expansion)
    width = {"in_features": 32, "out_features": 16, "bias": False, "module_input_name": "token_embeddings"}
    dense = Dense(**width, activation_function=nn.Identity())  # type: ignore[arg-type]
    normalize = Normalize(module_input_name="token_embeddings")
    return MultiVectorEncoder(modules=[encoder, dense, normalize, MultiVectorMask()], device="cpu")


def _scores(model: Any) -> Tensor:
    return model.similarity(model.encode_query(QUERIES), model.encode_document(DOCUMENTS))


def _steps(model: Any, cached: bool) -> list[float]:
    from sentence_transformers.multi_vector_encoder import losses

    if cached:
        loss: Any = losses.CachedMultiVectorMultipleNegativesRankingLoss(model, mini_batch_size=2)
    else:
        loss = losses.MultiVectorMultipleNegativesRankingLoss(model)
    optimizer, seen = torch.optim.AdamW(model.train().parameters(), lr=1e-3), []
    for _ in range(4):
        features = [
            {**model.preprocess(texts, task=task), "task": task}
            for texts, task in ((QUERIES, "query"), (DOCUMENTS, "document"))
        ]
        value = loss(features)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(value.item())
    return seen


# --- Heads, and unpad=False


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
    model.eval()
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
