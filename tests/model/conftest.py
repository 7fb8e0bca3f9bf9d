"""Kernels that have not landed yet stand in as plain formulas; leaves take even the smallest input, as tests are small."""

from __future__ import annotations

import importlib
import sys
import types

import pytest
import torch
from torch.nn import functional as F


def _embedding(ids, table, padding_idx=None):
    return F.embedding(ids, table, padding_idx)


def _embedding_layer_norm_dropout(
    ids,
    positions,
    types_,
    word,
    position,
    type_,
    weight,
    bias=None,
    *,
    eps,
    p=0.0,
    training=True,
    padding_idx=None,
    dtype=None,
):
    total = F.embedding(ids, word, padding_idx)
    if position is not None:
        total = total + F.embedding(positions, position)
    if type_ is not None:
        total = total + F.embedding(types_, type_)
    return F.dropout(F.layer_norm(total, weight.shape, weight, bias, eps), p, training)


def _cross_entropy(logits, labels, ignore_index=-100, reduction="mean"):
    return F.cross_entropy(logits, labels, ignore_index=ignore_index, reduction=reduction)


def _linear_cross_entropy(x, weight, bias, labels, ignore_index=-100, reduction="mean"):
    return F.cross_entropy(F.linear(x, weight, bias), labels, ignore_index=ignore_index, reduction=reduction)


_STAND_INS = {
    "embedding": {"embedding": _embedding, "embedding_layer_norm_dropout": _embedding_layer_norm_dropout},
    "loss": {"cross_entropy": _cross_entropy, "linear_cross_entropy": _linear_cross_entropy},
}
for _name, _functions in _STAND_INS.items():
    try:
        importlib.import_module(f"stoker.kernels.{_name}")
    except ModuleNotFoundError:
        _module = types.ModuleType(f"stoker.kernels.{_name}")
        _module.__dict__.update(_functions)
        sys.modules[_module.__name__] = _module


@pytest.fixture(autouse=True)
def _small_inputs_count(monkeypatch):
    from stoker.model import leaves

    monkeypatch.setattr(leaves, "SMALL_ELEMENTS", 0)
    monkeypatch.setattr(leaves, "SMALL_PRODUCT", 0)


@pytest.fixture(autouse=True)
def _one_thread():
    """Tiny tensors gain nothing from a second thread, and lose much where other processes hold the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
