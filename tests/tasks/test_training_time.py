"""The estimate of how long a training will take, which `stoker train sft` prints before it starts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from stoker.hf.meter import Work
from stoker.tasks.sft.training_time import estimate_seconds, rounded_duration

RATES: Any = SimpleNamespace(fp32_all=100.0, bf16_all=300.0)
WORK = Work(per_token=1e9, per_pair=0.0, per_label=1e9)


def arguments(**changed: Any) -> Any:
    usual = {
        "num_train_epochs": 2.0,
        "max_steps": -1,
        "gradient_accumulation_steps": 1,
        "train_batch_size": 5,
        "world_size": 1,
    }
    return SimpleNamespace(**{**usual, "tokens_per_batch": None, "bf16": False, **changed})


def test_the_time_follows_tokens_labels_epochs_steps_and_precision() -> None:
    lengths = np.full(10, 100)
    whole = estimate_seconds(WORK, RATES, lengths, 0.5, arguments())
    assert whole == pytest.approx(2 * 1000 * 1.5e9 / (100e9 * 0.5))
    assert estimate_seconds(WORK, RATES, lengths, 0.5, arguments(max_steps=2)) == pytest.approx(whole / 2)
    assert estimate_seconds(WORK, RATES, lengths, 0.5, arguments(bf16=True)) == pytest.approx(whole / 3)
    by_tokens = arguments(max_steps=4, tokens_per_batch=250)
    assert estimate_seconds(WORK, RATES, lengths, 0.5, by_tokens) == pytest.approx(whole / 2)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(20, "less than a minute"), (61, "about 1 minute"), (700, "about 12 minutes"), (9000, "about 2.5 hours")],
)
def test_the_estimate_is_shown_without_false_precision(seconds: float, text: str) -> None:
    assert rounded_duration(seconds) == text
