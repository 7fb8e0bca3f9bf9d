"""A batch that does not fit is refused before training, with one that fits and keeps the updates the same."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import transformers

from stoker.errors import UserError
from stoker.tasks.memory import check_memory, estimate


@pytest.fixture(scope="module")
def model() -> Any:
    config = transformers.BertConfig(hidden_size=128, num_hidden_layers=4, num_attention_heads=2, intermediate_size=512)
    return transformers.BertForQuestionAnswering(config)


def arguments(**changed: Any) -> Any:
    settings = {"per_device_train_batch_size": 64, "gradient_accumulation_steps": 1, "tokens_per_batch": None}
    return SimpleNamespace(**{**settings, "bf16": False, "world_size": 1, **changed})


LENGTHS = np.full(1000, 384)


def test_what_fits_passes(model: Any) -> None:
    assert check_memory(model, LENGTHS, arguments(), optimized=True, free=64 << 30) > 0


def test_what_does_not_fit_is_refused_with_a_batch_that_does(model: Any) -> None:
    free = 1_400_000_000
    with pytest.raises(UserError) as refusal:
        check_memory(model, LENGTHS, arguments(), optimized=True, free=free)
    found = re.search(
        r"--per_device_train_batch_size (\d+) --gradient_accumulation_steps (\d+) fits", str(refusal.value)
    )
    assert found is not None, refusal.value
    rows, accumulation = int(found[1]), int(found[2])
    assert rows * accumulation == 64
    check_memory(model, LENGTHS, arguments(per_device_train_batch_size=rows), optimized=True, free=free)


def test_a_model_too_large_for_one_row_says_so(model: Any) -> None:
    with pytest.raises(UserError, match="even one row at a time does not fit"):
        check_memory(model, LENGTHS, arguments(), optimized=True, free=200_000_000)


def test_padding_counts_only_where_it_is_computed(model: Any) -> None:
    lengths = np.array([384, 10, 10, 10])
    args = arguments(per_device_train_batch_size=4)
    stock = check_memory(model, lengths, args, optimized=False, free=1 << 40)
    assert stock - estimate(model, optimized=False).fixed > 3 * (
        check_memory(model, lengths, args, optimized=True, free=1 << 40) - estimate(model, optimized=True).fixed
    )
