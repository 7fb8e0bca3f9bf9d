"""Dropout off: loss, logits and every gradient are those of the stock model run example by example without padding.

All in fp32: the models are, and `optimize` keeps a model's own precision on every CPU.
"""

from __future__ import annotations

import copy

import pytest
import tiny_models as tiny
import torch

import stoker


def _check(family: str, head: str, full: tiny.Batch, **switches: object) -> None:
    stock = tiny.model(family, head)
    loss, logits, gradients = tiny.truth(stock, head, full)
    model = stoker.optimize(copy.deepcopy(stock), **switches)
    output = model(**full.kwargs)
    output.loss.backward()
    torch.testing.assert_close(output.loss.detach(), loss, rtol=1e-5, atol=1e-6)
    for actual, expected in zip(tiny.rows_of(output, head, full), logits, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    tiny.assert_same_gradients(tiny.gradients(model), gradients)


@pytest.mark.parametrize(("family", "head"), [(one, head) for one in tiny.FAMILIES for head in tiny.heads(one)])
@pytest.mark.parametrize("side", ["right", "left"])
def test_a_padded_batch_gives_what_its_examples_give_one_by_one(family: str, head: str, side: str) -> None:
    _check(family, head, tiny.batch(family, head, side))


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("switches", [{"fuse": False}, {"fuse_loss": False}])
def test_results_stay_the_same_if_one_part_is_switched_off(family: str, switches: dict[str, bool]) -> None:
    head = "MaskedLM" if "fuse_loss" in switches else tiny.token_head(family)
    _check(family, head, tiny.batch(family, head, "both"), **switches)
