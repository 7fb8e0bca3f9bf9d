"""DeBERTa's relative positions in every configuration that stock knows: results and gradients are those of stock."""

from __future__ import annotations

import copy
import logging

import pytest
import tiny_models as tiny
import torch
from torch import nn

import stoker
from stoker import requires
from stoker.model import sequences as packed

FAMILY = "DebertaV2"
VARIANTS = {
    "projections of their own": {"share_att_key": False},
    "queries with positions only": {"share_att_key": False, "pos_att_type": ["c2p"]},
    "keys with positions only": {"pos_att_type": ["p2c"]},
    "neither": {"pos_att_type": []},
    "no buckets": {"position_buckets": -1},
    "distances beyond the last position": {"position_buckets": -1, "max_relative_positions": 5},
    "positions without a norm": {"norm_rel_ebd": "none"},
    "absolute positions and token types": {"position_biased_input": True, "type_vocab_size": 2},
    "narrow embeddings": {"embedding_size": 24},
    "no relative positions": {"relative_attention": False, "position_biased_input": True},
}


def _batch(head: str, side: str = "right") -> tiny.Batch:
    return tiny.batch(FAMILY, head, side, lengths=(7, 31, 1, 18))


def _check(stock: nn.Module, head: str, full: tiny.Batch) -> stoker.Report:
    loss, logits, gradients = tiny.truth(stock, head, full)
    model = stoker.optimize(copy.deepcopy(stock), dtype=torch.float32)
    output = model(**full.kwargs)
    output.loss.backward()
    torch.testing.assert_close(output.loss.detach(), loss, rtol=1e-5, atol=1e-6)
    for actual, expected in zip(tiny.rows_of(output, head, full), logits, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    tiny.assert_same_gradients(tiny.gradients(model), gradients)
    return stoker.report(model)


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_every_configuration_gives_what_its_examples_give_one_by_one(changes: dict[str, object]) -> None:
    stock, full = tiny.model(FAMILY, "TokenClassification", **changes), _batch("TokenClassification", "both")
    if "type_vocab_size" in changes:
        full.inputs["token_type_ids"] = full.inputs["input_ids"] % 2
    report = _check(stock, "TokenClassification", full)
    assert report.left_alone == ()
    parts = {part for part, _, _ in report.applied}
    assert ("fused embeddings" in parts) == ("embedding_size" not in changes)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("legacy", [True, False])
def test_both_masked_lm_heads_are_fused(legacy: bool, side: str) -> None:
    report = _check(tiny.model(FAMILY, "MaskedLM", legacy=legacy), "MaskedLM", _batch("MaskedLM", side))
    assert ("masked-LM loss", "DebertaV2ForMaskedLM", 1) in report.applied
    assert report.left_alone == ()


def test_a_model_with_a_convolution_runs_as_stock_does(caplog) -> None:
    stock = tiny.model(FAMILY, "TokenClassification", conv_kernel_size=3, conv_act="gelu")
    full = _batch("TokenClassification")
    with caplog.at_level(logging.WARNING, "stoker"):
        model = stoker.optimize(copy.deepcopy(stock), dtype=torch.float32)
        losses = [one(**full.kwargs).loss for one in (stock, model)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-6)
    tiny.assert_same_gradients(tiny.gradients(model), tiny.gradients(stock))
    assert ("every call of DebertaV2Model", "it has a convolution over tokens") in stoker.report(model).left_alone
    assert sum("convolution" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize(("buckets", "reach"), [(256, 512), (6, 64), (-1, 40)])
@pytest.mark.parametrize("longest", [1, 2, 129, 700])
def test_the_positions_of_distances_are_those_of_stock(longest: int, buckets: int, reach: int) -> None:
    changes = {"position_buckets": buckets, "max_relative_positions": reach}
    encoder = stoker.optimize(tiny.model(FAMILY, **changes)).encoder
    full = encoder.get_rel_pos(torch.empty(1, longest, 0))[0]
    batch = packed.read_mask(None, 1, longest, dtype=torch.float32, device=torch.device("cpu"))
    assert isinstance(batch, packed.Sequences)
    with packed.running(batch):
        found = encoder.get_rel_pos(torch.empty(1, longest, 0))
    assert torch.equal(found, torch.cat([full[0, 1:].flip(0), full[:, 0]]))
    query, key = torch.meshgrid(torch.arange(longest), torch.arange(longest), indexing="ij")
    assert torch.equal(found[longest - 1 + query - key], full)


def test_nothing_of_the_size_of_tokens_squared_is_allocated() -> None:
    """The same for the relative positions of all pairs, which stock stores as int64."""
    seen: list[int] = []

    class Sizes(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            output = func(*args, **(kwargs or {}))
            if isinstance(output, torch.Tensor):
                seen.append(output.nbytes)
            return output

    model, full = (
        stoker.optimize(tiny.model(FAMILY, position_buckets=2)),
        tiny.batch(FAMILY, "Model", lengths=(30,) * 20),
    )
    with Sizes():
        model(**full.inputs)
    assert seen
    assert max(seen) < (30 * 20) ** 2 * 8 / 2
    assert stoker.report(model).left_alone == ()


def test_the_projections_of_positions_may_be_hooked() -> None:
    stock, full = tiny.model(FAMILY, "SequenceClassification", share_att_key=False), _batch("SequenceClassification")
    model = stoker.optimize(copy.deepcopy(stock), dtype=torch.float32)
    calls = []
    for one in (stock, model):
        attention = one.deberta.encoder.layer[0].attention.self
        attention.pos_key_proj.register_forward_hook(lambda *_: calls.append(1))
    losses = [one(**full.kwargs).loss for one in (stock, model)]
    for loss in losses:
        loss.backward()
    assert len(calls) == 2
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-5)
    tiny.assert_same_gradients(tiny.gradients(model), tiny.gradients(stock), 1e-3)
    assert stoker.report(model).left_alone == ()


def test_another_signature_in_transformers_leaves_the_model_as_it_is(monkeypatch, caplog) -> None:
    stock, full = tiny.model(FAMILY, "SequenceClassification"), _batch("SequenceClassification")
    encoder = type(stock.deberta.encoder)
    own = encoder.get_rel_pos
    monkeypatch.setattr(encoder, "get_rel_pos", lambda self, states, *rest: own(self, states, *rest))
    for cache in (requires.missing, requires.supported):
        cache.cache_clear()
    try:
        model = stoker.optimize(copy.deepcopy(stock), dtype=torch.float32)
    finally:
        for cache in (requires.missing, requires.supported):
            cache.cache_clear()
    assert "DeBERTa models are computed with their padding, because transformers" in caplog.text
    assert "fused layer" not in {part for part, _, _ in stoker.report(model).applied}
    torch.testing.assert_close(model(**full.kwargs).loss, stock(**full.kwargs).loss, rtol=1e-4, atol=1e-5)


def test_only_the_positions_that_occur_are_projected() -> None:
    """Others get no gradient, as in stock."""
    stock = tiny.model(FAMILY, "SequenceClassification", position_buckets=32, norm_rel_ebd="none")
    model = stoker.optimize(copy.deepcopy(stock), dtype=torch.float32)
    model(**tiny.batch(FAMILY, "SequenceClassification", lengths=(4, 3)).kwargs).loss.backward()
    used = model.deberta.encoder.rel_embeddings.weight.grad.abs().sum(1).nonzero().squeeze(1)
    assert used.tolist() == list(range(32 - 3, 32 + 4))
