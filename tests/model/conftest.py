"""Leaf modules use their kernels for the smallest inputs too, and one thread is enough: the models of these tests are tiny."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _small_inputs_count(monkeypatch):
    from stoker.model import leaf_modules

    monkeypatch.setattr(leaf_modules, "SMALL_ELEMENTS", 0)
    monkeypatch.setattr(leaf_modules, "SMALL_PRODUCT", 0)


@pytest.fixture(autouse=True)
def _one_thread():
    """Tiny tensors gain nothing from a second thread, and lose much if other processes use the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
