"""Unusual batches: whatever stock accepts is accepted, with the result of stock."""

from __future__ import annotations

import copy
import logging

import pytest
import tiny_models as tiny
import torch

import stoker


def _pair(family: str = "Bert"):
    stock = tiny.model(family).eval()
    return stock, stoker.optimize(copy.deepcopy(stock), dtype=torch.float32)


@pytest.mark.parametrize("kind", [torch.bool, torch.int64])
@pytest.mark.parametrize("layout", ["sliced", "transposed"])
def test_a_mask_may_be_a_view(kind: torch.dtype, layout: str) -> None:
    _, model = _pair()
    full = tiny.batch("Bert", "Model")
    mask = full.inputs["attention_mask"].to(kind)
    rows, width = mask.shape
    view = (
        torch.zeros(rows, width + 3, dtype=kind)[:, :width]
        if layout == "sliced"
        else torch.zeros(width, rows, dtype=kind).t()
    )
    view.copy_(mask)
    assert not view.is_contiguous()
    expected = model(**full.inputs).last_hidden_state
    torch.testing.assert_close(model(**{**full.inputs, "attention_mask": view}).last_hidden_state, expected)


def test_a_dictionary_of_masks_runs_as_stock_does() -> None:
    stock, model = _pair("ModernBert")
    ids = torch.randint(5, tiny.VOCABULARY, (2, 6))
    masks = {"full_attention": None, "sliding_attention": None}
    expected = stock(input_ids=ids, attention_mask=masks).last_hidden_state
    torch.testing.assert_close(
        model(input_ids=ids, attention_mask=masks).last_hidden_state, expected, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("shape", [(0, 6), (2, 0)])
@pytest.mark.parametrize("masked", [True, False])
def test_an_empty_batch_raises_the_error_of_stock(shape: tuple[int, int], masked: bool) -> None:
    stock, model = _pair()
    ids = torch.zeros(shape, dtype=torch.long)
    call = {"input_ids": ids, **({"attention_mask": torch.ones_like(ids)} if masked else {})}
    with pytest.raises((RuntimeError, IndexError)) as expected:
        stock(**call)
    with pytest.raises(type(expected.value)) as found:
        model(**call)
    assert str(found.value) == str(expected.value)
    assert "empty" in str(stoker.report(model))


def test_position_ids_of_one_dimension_apply_to_all_rows() -> None:
    stock, model = _pair()
    ids = torch.randint(5, tiny.VOCABULARY, (3, 6))
    call = {"input_ids": ids, "token_type_ids": torch.zeros_like(ids), "position_ids": torch.arange(7, 13)}
    expected, found = stock(**call).last_hidden_state, model(**call).last_hidden_state
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_unsupported_masks_of_many_shapes_are_logged_once(caplog) -> None:
    _, model = _pair()
    with caplog.at_level(logging.WARNING, "stoker"):
        for length in (4, 5, 6):
            ids = torch.randint(5, tiny.VOCABULARY, (2, length))
            model(input_ids=ids, attention_mask=torch.zeros(2, 1, length, length))
    assert sum("runs as stock" in record.message for record in caplog.records) == 1
    assert len(stoker.report(model).left_alone) == 1


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_parameters_in_bf16_train_close_to_fp32(family: str) -> None:
    stock = tiny.model(family, "SequenceClassification")
    model = stoker.optimize(copy.deepcopy(stock).bfloat16())
    full = tiny.batch(family, "SequenceClassification")
    loss = model(**full.kwargs).loss
    loss.backward()
    expected = stock(**full.kwargs).loss
    torch.testing.assert_close(loss.float(), expected, rtol=0.1, atol=0.1)
    # the norm after the last layer, for which there is a kernel in fp32 only
    assert [what for what, _ in stoker.report(model).left_alone] == ["1 x EuroBertRMSNorm"] * (family == "EuroBert")
    assert all(gradient.isfinite().all() for gradient in tiny.gradients(model).values())


def test_a_model_without_parameters_runs_as_stock_does() -> None:
    stock, model = _pair()
    ids = torch.randint(5, tiny.VOCABULARY, (2, 6))
    expected = stock(input_ids=ids).last_hidden_state
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            del module._parameters[name]
            setattr(module, name, None if parameter is None else parameter.detach())
    torch.testing.assert_close(model(input_ids=ids).last_hidden_state, expected, rtol=1e-4, atol=1e-4)
