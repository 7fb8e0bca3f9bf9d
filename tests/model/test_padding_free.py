"""Inputs and outputs of a padding-free base model: every kind of batch, and every kind of call that has to run as stock."""

from __future__ import annotations

import copy
import logging

import pytest
import tiny_models as tiny
import torch

import stoker
from stoker.model import fused_layer
from stoker.model.families import transformers_major


def _pair(family: str, head: str = "Model", dropout: float = 0.0):
    stock = tiny.model(family, head, dropout)
    return stock, stoker.optimize(copy.deepcopy(stock), dtype=torch.float32)


def _alone(stock: torch.nn.Module, full: tiny.Batch, name: str = "last_hidden_state") -> list[torch.Tensor]:
    rows = []
    for row, (start, end) in enumerate(full.spans):
        if end > start:
            rows.append(stock(**{key: value[row : row + 1, start:end] for key, value in full.inputs.items()})[name])
    return rows


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("side", ["right", "left", "both"])
def test_hidden_states_and_pooler_output_have_the_padded_shape(family: str, side: str) -> None:
    stock, model = _pair(family)
    full = tiny.batch(family, "Model", side)
    model.eval()  # in training, padding is computed until it is known that nobody reads it
    with torch.no_grad():
        model(**full.inputs, output_hidden_states=True)  # transformers hooks the layers at the first call
        output = model(**full.inputs, output_hidden_states=True)
    expected = stock(**full.inputs, output_hidden_states=True)
    assert stoker.report(model).left_alone == ()
    assert list(output.keys()) == list(expected.keys())
    assert len(output.hidden_states) == len(expected.hidden_states)
    assert all(a.shape == b.shape for a, b in zip(output.hidden_states, expected.hidden_states, strict=True))
    for row, alone in enumerate(_alone(stock, full)):
        start, end = full.spans[row]
        torch.testing.assert_close(output.last_hidden_state[row, start:end], alone[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(output.hidden_states[-1][row, start:end], alone[0], rtol=1e-4, atol=1e-4)
    assert not output.last_hidden_state[:, -1][
        torch.tensor([end for _, end in full.spans]) < full.inputs["input_ids"].shape[1]
    ].any()
    if "pooler_output" in expected:
        torch.testing.assert_close(
            output.pooler_output, torch.cat(_alone(stock, full, "pooler_output")), rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("family", ["Bert", "MPNet", "Albert", "DistilBert"])
@pytest.mark.parametrize("head", ["Model", "QuestionAnswering", "MaskedLM"])
def test_a_tuple_is_returned_where_stock_returns_one(family: str, head: str) -> None:
    stock, model = _pair(family, head)
    full = tiny.batch(family, head, lengths=(6, 6))
    full.inputs["attention_mask"].fill_(1)
    options = {**full.kwargs, "return_dict": False, "output_hidden_states": True}
    output, expected = model(**options), stock(**options)
    assert isinstance(output, tuple)
    assert [type(value) for value in output] == [type(value) for value in expected]
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_batches_without_a_mask_are_all_real_tokens(family: str) -> None:
    stock, model = _pair(family)
    ids = torch.randint(5, tiny.VOCABULARY, (3, 8))
    torch.testing.assert_close(
        model(input_ids=ids).last_hidden_state, stock(input_ids=ids).last_hidden_state, rtol=1e-4, atol=1e-4
    )
    torch.testing.assert_close(model(ids)[0], stock(ids)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(transformers_major() < 5, reason="earlier versions do not take cumulative lengths")
@pytest.mark.parametrize("family", ["Bert", "ModernBert", "EuroBert"])
def test_cumulative_lengths_split_a_flattened_batch(family: str) -> None:
    """As transformers' DataCollatorWithFlattening and sentence-transformers make it."""
    stock, model = _pair(family)
    lengths = (5, 1, 8)
    ids = torch.randint(5, tiny.VOCABULARY, (1, sum(lengths)))
    ends = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    output = model(input_ids=ids, position_ids=positions, cu_seq_lens_q=ends, cu_seq_lens_k=ends).last_hidden_state
    assert stoker.report(model).left_alone == ()
    alone = torch.cat([stock(input_ids=part).last_hidden_state for part in ids.split(lengths, dim=1)], dim=1)
    torch.testing.assert_close(output, alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_inputs_embeds_and_explicit_positions_are_used_as_given(family: str) -> None:
    stock, model = _pair(family)
    width = stock.get_input_embeddings().weight.shape[1]
    embeds = torch.randn(2, 8, width, requires_grad=True)
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[0, 5:] = 0
    positions = torch.arange(20, 28).unsqueeze(0)
    for given in ({}, {"position_ids": positions}, {"position_ids": positions.expand(2, -1)}):
        output = model(inputs_embeds=embeds, attention_mask=mask, **given).last_hidden_state
        assert stoker.report(model).left_alone == ()
        (gradient,) = torch.autograd.grad(output[mask.bool()].square().sum(), embeds)
        cut = {name: value[:1, :5] for name, value in given.items()}
        first = stock(inputs_embeds=embeds[:1, :5], **cut).last_hidden_state
        (expected,) = torch.autograd.grad(first.square().sum(), embeds)
        torch.testing.assert_close(output[:1, :5], first, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(gradient[0], expected[0], rtol=1e-3, atol=1e-3)


def test_roberta_skips_unmasked_padding_tokens_when_counting_positions() -> None:
    stock, model = _pair("Roberta", "SequenceClassification")
    ids = torch.randint(5, tiny.VOCABULARY, (2, 8))
    ids[0, 3] = 1  # the padding id, but not masked
    labels = torch.tensor([0, 1])
    model(input_ids=ids, labels=labels).loss.backward()
    stock(input_ids=ids, labels=labels).loss.backward()
    tiny.assert_same_gradients(tiny.gradients(model), tiny.gradients(stock))


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_rows_of_padding_only_are_zeros_and_do_not_affect_others(family: str) -> None:
    stock, model = _pair(family)
    full = tiny.batch(family, "Model", lengths=(7, 0, 4))
    output = model(**full.inputs).last_hidden_state
    assert not output[1].any()
    for row, alone in zip((0, 2), _alone(stock, full), strict=True):
        start, end = full.spans[row]
        torch.testing.assert_close(output[row, start:end], alone[0], rtol=1e-4, atol=1e-4)
    output.square().sum().backward()
    assert all(gradient.isfinite().all() for gradient in tiny.gradients(model).values())


def test_a_batch_of_padding_only_runs_as_stock_does() -> None:
    stock, model = _pair("Bert")
    ids, mask = torch.zeros(2, 4, dtype=torch.long), torch.zeros(2, 4, dtype=torch.long)
    expected = stock(input_ids=ids, attention_mask=mask).last_hidden_state
    torch.testing.assert_close(model(input_ids=ids, attention_mask=mask).last_hidden_state, expected)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_needs_no_gradient(mode) -> None:
    stock, model = _pair("Bert", "MaskedLM", dropout=0.1)
    full = tiny.batch("Bert", "MaskedLM", lengths=(6, 6))
    full.inputs["attention_mask"].fill_(1)
    with mode():
        output, expected = model.eval()(**full.kwargs), stock.eval()(**full.kwargs)
    torch.testing.assert_close(output.loss, expected.loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(output.logits, expected.logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [torch.bool, torch.float32, torch.int32])
def test_the_dtype_of_the_mask_does_not_matter(kind: torch.dtype) -> None:
    _, model = _pair("Bert")
    full = tiny.batch("Bert", "Model")
    other = {**full.inputs, "attention_mask": full.inputs["attention_mask"].to(kind)}
    torch.testing.assert_close(model(**full.inputs).last_hidden_state, model(**other).last_hidden_state)


STOCK_CALLS = {
    "4-D mask": lambda mask: {"attention_mask": torch.where(mask[:, None, None, :] == 1, 0.0, -1e9)},
    "holes": lambda mask: {"attention_mask": mask * torch.tensor([1, 0] + [1] * (mask.shape[1] - 2))},
    "attention weights": lambda mask: {"attention_mask": mask, "output_attentions": True},
}


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("kind", STOCK_CALLS)
def test_calls_that_cannot_be_padding_free_run_as_stock_and_are_logged_once(family: str, kind: str, caplog) -> None:
    stock = tiny.model(family)
    if kind == "attention weights":
        stock.set_attn_implementation("eager")
    model = stoker.optimize(copy.deepcopy(stock), dtype=torch.float32)
    full = tiny.batch(family, "Model")
    call = {**full.inputs, **STOCK_CALLS[kind](full.inputs["attention_mask"])}
    with caplog.at_level(logging.WARNING, "stoker"):
        output, expected = model(**call), stock(**call)
        model(**call)
    real = full.inputs["attention_mask"].bool()
    torch.testing.assert_close(output[0][real], expected[0][real], rtol=1e-4, atol=1e-4)
    assert sum("runs as stock" in record.getMessage() for record in caplog.records) == 1
    assert len(stoker.report(model).left_alone) == 1
    if kind == "attention weights":
        torch.testing.assert_close(output.attentions, expected.attentions, rtol=1e-4, atol=1e-4)


def test_a_decoder_made_of_a_known_family_runs_as_stock_does() -> None:
    import transformers

    stock = transformers.BertLMHeadModel(transformers.BertConfig(**tiny._COMMON, is_decoder=True)).eval()
    model = stoker.optimize(copy.deepcopy(stock), dtype=torch.float32)
    ids = torch.randint(5, tiny.VOCABULARY, (2, 8))
    torch.testing.assert_close(model(ids).logits, stock(ids).logits, rtol=1e-4, atol=1e-4)
    assert "decoder" in str(stoker.report(model))


def _embedding_dropouts(model: torch.nn.Module) -> list[torch.nn.Module]:
    names = ("embeddings.dropout", "embeddings.drop")
    return [module for name, module in model.named_modules() if name.endswith(names)]


@pytest.mark.parametrize("family", [name for name in tiny.FAMILIES if name not in ("MPNet", "Albert")])
@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_recomputes_the_same_layers(family: str, reentrant: bool) -> None:
    if reentrant and family == "DebertaV2":
        pytest.skip("its layers share a tensor that torch's reentrant checkpoint does not know: stock raises an error")
    results, head = [], tiny.token_head(family)
    for checkpointed in (False, True):
        model = stoker.optimize(tiny.model(family, head, dropout=0.1), dtype=torch.float32)
        # transformers hooks the word embeddings here, so that they are not fused and draw another mask
        for module in _embedding_dropouts(model):
            module.p = 0.0
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        full = tiny.batch(family, head)
        torch.manual_seed(5)
        loss = model(**full.kwargs).loss
        loss.backward()
        results.append((loss.detach(), tiny.gradients(model)))
        assert stoker.report(model).left_alone == ()
    torch.testing.assert_close(results[0][0], results[1][0])
    tiny.assert_same_gradients(results[1][1], results[0][1])


def test_hooks_on_layers_see_the_same_shapes_as_in_stock() -> None:
    _, model = _pair("Bert")
    seen: list[torch.Size] = []
    model.encoder.layer[0].register_forward_hook(lambda module, args, output: seen.append(output.shape))
    full = tiny.batch("Bert", "Model")
    output = model(**full.inputs).last_hidden_state
    assert seen == [output.shape]


def test_hooks_inside_a_layer_are_called() -> None:
    _, model = _pair("Bert")
    full = tiny.batch("Bert", "Model")
    before = model(**full.inputs).last_hidden_state
    seen: list[str] = []
    layer = model.encoder.layer[0]
    for name in ("attention.self.query", "output.dense", "intermediate.dense"):
        layer.get_submodule(name).register_forward_hook(lambda module, args, output, name=name: seen.append(name))
    after = model(**full.inputs).last_hidden_state
    assert seen == ["attention.self.query", "intermediate.dense", "output.dense"]
    torch.testing.assert_close(before, after, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_no_quadratic_mask_is_allocated(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    seen: list[int] = []
    stock = fused_layer.FusedLayer.__call__

    def call(self, *args, **kwargs):
        masks = [kwargs.get("attention_mask"), *args[1:2]]  # second in every family's layer
        calls.append(len(masks))
        seen.extend(mask.numel() for mask in masks if isinstance(mask, torch.Tensor))
        return stock(self, *args, **kwargs)

    monkeypatch.setattr(fused_layer.FusedLayer, "__call__", call)
    model, full = stoker.optimize(tiny.model(family), dtype=torch.float32), tiny.batch(family, "Model")
    model(**full.inputs)
    tokens = sum(end - start for start, end in full.spans)
    assert calls, "no fused layer was called"
    assert all(numel <= tokens for numel in seen), (seen, tokens)


def test_question_answering_excludes_padding_from_the_softmax() -> None:
    """The one place where stock's batch differs from its examples alone: docs/optimize.md says so."""
    stock, model = _pair("Bert", "QuestionAnswering")
    full = tiny.batch("Bert", "QuestionAnswering")
    alone, _, _ = tiny.truth(stock, "QuestionAnswering", full)
    torch.testing.assert_close(model(**full.kwargs).loss, alone, rtol=1e-5, atol=1e-6)
    assert stock(**full.kwargs).loss > alone + 0.05
    padding = full.inputs["attention_mask"] == 0
    assert (model(**full.inputs).start_logits[padding] < -1000).all()


def test_random_lengths() -> None:
    generator = torch.Generator().manual_seed(0)
    for seed in range(5):
        lengths = tuple(torch.randint(1, 40, (6,), generator=generator).tolist())
        family = tiny.FAMILIES[seed % len(tiny.FAMILIES)]
        stock, model = _pair(family)
        full = tiny.batch(family, "Model", ("right", "left")[seed % 2], lengths, seed)
        output = model(**full.inputs).last_hidden_state
        for row, alone in enumerate(_alone(stock, full)):
            start, end = full.spans[row]
            torch.testing.assert_close(output[row, start:end], alone[0], rtol=1e-4, atol=1e-4)


def test_masked_lm_logits_are_computed_on_access() -> None:
    _, model = _pair("Bert", "MaskedLM")
    full = tiny.batch("Bert", "MaskedLM")
    output = model(**full.kwargs, output_hidden_states=True)
    assert "logits" in output
    assert torch.equal(output["loss"], output[0])
    assert output.__dict__["logits"] is None, "reading the loss must not cost the logits"
    assert list(output) == ["loss", "logits", "hidden_states"]
    assert output.logits.shape == (4, 14, tiny.VOCABULARY)
    assert output.logits is output["logits"] is output[1] is output.to_tuple()[1]
    real = full.inputs["attention_mask"].bool()
    expected = model.eval()(**full.inputs).logits
    torch.testing.assert_close(output.logits[real], expected[real], rtol=1e-4, atol=1e-4)
