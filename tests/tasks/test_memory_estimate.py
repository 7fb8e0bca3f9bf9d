"""A batch that does not fit is refused before training, with one that fits and keeps the updates the same."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import stoker
from stoker.errors import UserError
from stoker.tasks.memory_estimate import check_memory, estimate


@pytest.fixture(scope="module")
def model() -> Any:
    config = transformers.BertConfig(hidden_size=128, num_hidden_layers=4, num_attention_heads=2, intermediate_size=512)
    return transformers.BertForQuestionAnswering(config)


def arguments(**changed: Any) -> Any:
    settings = {"per_device_train_batch_size": 64, "gradient_accumulation_steps": 1, "tokens_per_batch": None}
    return SimpleNamespace(**{**settings, "bf16": False, "world_size": 1, **changed})


LENGTHS = np.full(1000, 384)


def test_a_batch_that_fits_passes(model: Any) -> None:
    assert check_memory(model, LENGTHS, arguments(), optimized=True, free=64 << 30) > 0


def test_a_batch_that_does_not_fit_is_rejected_with_one_that_does(model: Any) -> None:
    free = 1_400_000_000
    with pytest.raises(UserError) as refusal:
        check_memory(model, LENGTHS, arguments(), optimized=True, free=free)
    found = re.search(
        r"--per_device_train_batch_size (\d+) --gradient_accumulation_steps (\d+) fit ", str(refusal.value)
    )
    assert found is not None, refusal.value
    rows, accumulation = int(found[1]), int(found[2])
    assert rows * accumulation == 64
    check_memory(model, LENGTHS, arguments(per_device_train_batch_size=rows), optimized=True, free=free)


@pytest.mark.parametrize("asked", [5, 7, 12, 30])
def test_accumulation_keeps_the_rows_per_update(model: Any, asked: int) -> None:
    need = estimate(model, optimized=True)
    free = int(need.bytes(LENGTHS[: asked // 2]) / 0.9) + 1  # not quite half of the batch, which need not divide it
    with pytest.raises(UserError) as refusal:
        check_memory(model, LENGTHS, arguments(per_device_train_batch_size=asked), optimized=True, free=free)
    found = re.search(r"batch_size (\d+) --gradient_accumulation_steps (\d+)", str(refusal.value))
    assert found is not None, refusal.value
    assert int(found[1]) * int(found[2]) == asked


def test_a_batch_of_tokens_counts_its_tokens_and_not_its_longest_rows(model: Any) -> None:
    lengths = np.array([10] * 900 + [384] * 100)
    args = arguments(tokens_per_batch=8192)
    need = estimate(model, optimized=True)
    assert check_memory(model, lengths, args, optimized=True, free=64 << 30) == pytest.approx(
        need.fixed + 8192 * need.per_token
    )
    free = int((need.fixed + 5000 * need.per_token) / 0.9)
    with pytest.raises(UserError, match=r"a batch of 8192 tokens.*--tokens_per_batch 4096 fits"):
        check_memory(model, lengths, args, optimized=True, free=free)


def test_the_estimate_is_slightly_above_the_measured_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).parents[2]
    figures = json.loads((root / "docs/figures/train_step.json").read_text())["cases"]
    monkeypatch.syspath_prepend(str(root / "benchmarks"))
    from train_step import CASES, build_model  # type: ignore[import-not-found]

    compared = 0
    for name, case in CASES.items():
        with torch.device("meta"):
            model = build_model(case)
        for side, optimized, bf16 in (("stock", False, False), ("stoker", True, False), ("stoker bf16", True, True)):
            if side in figures.get(name, {}):
                need = estimate(model, optimized=optimized, bf16=bf16)
                batches = [np.array(batch) for batch in case.lengths]
                if not optimized:
                    batches = [np.full(len(batch), case.pad_to or batch.max()) for batch in batches]
                ratio = figures[name][side]["peak_bytes"] / max(map(need.bytes, batches))
                assert 0.6 < ratio < 1.0, (name, side, ratio)
                compared += 1
    assert compared >= 6


def test_a_model_too_large_for_one_row_is_rejected(model: Any) -> None:
    with pytest.raises(UserError, match="even one row does not fit"):
        check_memory(model, LENGTHS, arguments(), optimized=True, free=200_000_000)


def test_frozen_weights_count_with_the_bytes_that_they_are_stored_in() -> None:
    config = transformers.BertConfig(hidden_size=128, num_hidden_layers=4, num_attention_heads=2, intermediate_size=512)
    frozen = transformers.BertForQuestionAnswering(config).requires_grad_(False)
    before = estimate(frozen, optimized=True).fixed
    linears = [module.weight for module in frozen.modules() if isinstance(module, torch.nn.Linear)]
    stoker.optimize(frozen, frozen_weights="nf4")
    saved = before - estimate(frozen, optimized=True).fixed
    assert saved == sum(weight.numel() for weight in linears) * (4 - 0.5 - 4 / 64)


def test_padding_counts_only_without_optimization(model: Any) -> None:
    lengths = np.array([384, 10, 10, 10])
    args = arguments(per_device_train_batch_size=4)
    stock = check_memory(model, lengths, args, optimized=False, free=1 << 40)
    assert stock - estimate(model, optimized=False).fixed > 3 * (
        check_memory(model, lengths, args, optimized=True, free=1 << 40) - estimate(model, optimized=True).fixed
    )
