"""The estimate of how long a training will take, which `stoker train sft` prints before it starts."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from stoker.hf.meter import Work
from stoker.hf.step_cost import Rows, Speed, StepCost
from stoker.tasks.sft.training_time import all_rows, estimate_seconds, rounded_duration

LENGTHS = np.full(10, 100)
COST = StepCost(
    work=Work(per_token=1e9, per_pair=0.0, per_label=1e9), weights=0.5e9 / 2, head=0.0, adapters=0.0, moved_per_token=0.0,
    moved_per_batch=0.0, moved_per_update=0.0, trained=0, calls=0,
)  # fmt: skip
SPEED = Speed(flops=100e9, bytes=10e9)


def arguments(**changed: Any) -> Any:
    usual = {
        "num_train_epochs": 2.0, "max_steps": -1, "gradient_accumulation_steps": 1, "train_batch_size": 5, "world_size": 1,
        "tokens_per_batch": None, "gradient_checkpointing": False,
    }  # fmt: skip
    return SimpleNamespace(**{**usual, **changed})


def test_two_epochs_are_all_rows_twice_in_batches_of_five() -> None:
    assert all_rows(LENGTHS, 0.5, arguments()) == Rows(2000, 200_000, 1000, batches=4, updates=4)
    assert all_rows(LENGTHS, 0.5, arguments(gradient_accumulation_steps=2)) == Rows(2000, 200_000, 1000, 4, 2)


def test_two_processes_have_half_of_the_rows_each() -> None:
    assert all_rows(LENGTHS, 0.5, arguments(world_size=2)) == Rows(1000, 100_000, 500, batches=2, updates=2)


def test_a_number_of_steps_counts_instead_of_epochs() -> None:
    assert all_rows(LENGTHS, 0.5, arguments(max_steps=2)) == Rows(1000, 100_000, 500, batches=2, updates=2)
    by_tokens = arguments(max_steps=4, tokens_per_batch=250)
    assert all_rows(LENGTHS, 0.5, by_tokens) == Rows(1000, 100_000, 500, batches=4, updates=4)


def test_the_time_is_that_of_the_cost_and_of_activations_that_are_computed_again() -> None:
    whole = estimate_seconds(COST, SPEED, LENGTHS, 0.5, arguments())
    assert whole == pytest.approx(COST.seconds(Rows(2000, 200_000, 1000, 4, 4), SPEED))
    again = estimate_seconds(COST, SPEED, LENGTHS, 0.5, arguments(gradient_checkpointing=True))
    once_more = dataclasses.replace(COST, work=Work(1.5e9, 0.0, 1e9))
    assert again == pytest.approx(once_more.seconds(Rows(2000, 200_000, 1000, 4, 4), SPEED))
    assert again > 1.2 * whole


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(20, "less than a minute"), (61, "about 1 minute"), (700, "about 12 minutes"), (9000, "about 2.5 hours")],
)
def test_the_estimate_is_shown_without_false_precision(seconds: float, text: str) -> None:
    assert rounded_duration(seconds) == text
