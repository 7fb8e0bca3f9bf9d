"""Tied embeddings: the gradients of the input embeddings and of the head are summed in one array."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

import stoker
from stoker.kernels.embedding import embedding, shares_gradient

VOCABULARY, WIDTH = 4096, 64
TABLE_BYTES = 4 * VOCABULARY * WIDTH


def _model(tied: bool = True) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=64, tie_word_embeddings=tied, pad_token_id=5,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).train()


def _batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 64, (8, 40), generator=torch.Generator().manual_seed(1))  # every token several times
    labels = ids.clone()
    labels[:, :20] = -100
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def _gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def _assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, wanted in expected.items():
        assert float((actual[name] - wanted).norm()) <= 1e-4 * float(wanted.norm()), name


def test_the_summed_gradient_is_that_of_the_stock_model_also_over_several_batches() -> None:
    stock, ours = _model(), stoker.optimize(_model())
    assert ours.lm_head.weight is ours.model.embed_tokens.weight
    for _ in range(2):  # the second one is added to the first
        for model in (stock, ours):
            (model(**_batch()).loss * 0.5).backward()
        _assert_same(_gradients(ours), _gradients(stock))
    assert not ours.lm_head.weight.grad.is_sparse


def test_the_backward_pass_makes_one_array_of_the_size_of_the_table() -> None:
    large = {}
    for tied in (True, False):
        model = stoker.optimize(_model(tied))
        loss = model(**_batch()).loss  # the gradient of the head is made here
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            loss.backward()
        sizes = [event.self_cpu_memory_usage for event in profile.events()]
        large[tied] = sum(size >= TABLE_BYTES for size in sizes)
        gradients = {id(p.grad): p.grad for p in model.parameters() if p.shape[0] == VOCABULARY}
        assert len(gradients) == (1 if tied else 2)
    assert large == {True: 0, False: 1}


def test_two_losses_in_one_backward_pass_are_summed() -> None:
    found = []
    for model in (_model(), stoker.optimize(_model())):
        first, second = _batch(), _batch()
        second["input_ids"] = second["input_ids"].flip(1)
        (model(**first).loss + 2 * model(**second).loss).backward()
        found.append(_gradients(model))
    _assert_same(found[1], found[0])


def test_a_loss_and_the_logits_in_one_backward_pass_are_summed() -> None:
    found = []
    for model in (_model(), stoker.optimize(_model())):
        output = model(**_batch())
        (output.loss + output.logits.square().mean()).backward()
        found.append(_gradients(model))
    _assert_same(found[1], found[0])


def test_a_loss_that_does_not_use_the_head_gives_the_table_a_dense_gradient() -> None:
    model, batch = stoker.optimize(_model()), _batch()
    output = model(**batch, output_hidden_states=True)
    output.hidden_states[-1].square().mean().backward()
    table = model.lm_head.weight.grad
    assert not table.is_sparse
    assert float(table.norm()) > 0
    output = model(**batch, output_hidden_states=True)
    (output.loss + output.hidden_states[-1].square().mean()).backward()  # both in one pass
    assert not model.lm_head.weight.grad.is_sparse


@pytest.mark.parametrize("padding_idx", [None, 3])
def test_rows_are_added_to_the_dense_gradient_of_the_same_table_only(padding_idx: int | None) -> None:
    ids = torch.tensor([[1, 3, 3], [0, 1, 2]])
    tables = [torch.randn(9, 5, requires_grad=True) for _ in range(2)]
    expected = []
    for table in tables:
        rows = torch.nn.functional.embedding(ids, table, padding_idx)
        expected.append(torch.autograd.grad((rows.sin() * 2).sum() + (tables[0].cos() * 3).sum(), table)[0])
    rows = [embedding(ids, table, padding_idx) for table in tables]
    head = (tables[0].cos() * 3).sum()
    shares_gradient(head, tables[0])
    (sum((part.sin() * 2).sum() for part in rows) + head).backward()
    for table, wanted in zip(tables, expected, strict=True):
        assert table.grad is not None
        assert not table.grad.is_sparse
        torch.testing.assert_close(table.grad, wanted)
