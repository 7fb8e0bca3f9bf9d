"""The log names a slow rank that the others wait for, and none where ranks do not synchronize."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from stoker.distributed.stragglers import step_waits
from stoker.hf.ranks import Ranks


def figures(waits: list[list[float]], seconds: float = 0.3) -> dict[str, float]:
    """What two ranks log after steps with these waiting times."""
    trainer: Any = SimpleNamespace(
        state=SimpleNamespace(global_step=len(waits)),
        recorder=SimpleNamespace(write=lambda *_, **__: None),
        is_world_process_zero=lambda: True,
    )
    ranks = Ranks(trainer)
    ranks._waiting = SimpleNamespace(gather=lambda: step_waits(waits))  # type: ignore[assignment]
    ranks._step_seconds = [seconds] * len(waits)
    return ranks.figures()


def test_the_slow_rank_is_named_under_local_sgd_although_it_synchronizes_rarely(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, logger="stoker"):
        found = figures([[0.0, 0.0], [0.0, 0.0], [0.0, 0.0], [1.0, 0.2]] * 3)
    assert found == {"waited": 0.1, "waited_for_rank": 1}
    assert "rank 1 is slow: the other ranks waited for it in 3 of the last 3 synchronizations" in caplog.text


def test_without_synchronization_no_rank_is_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="stoker"):
        assert figures([[0.0, 0.0]] * 12) == {"waited": 0.0}
    assert not caplog.text


def test_short_waits_give_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="stoker"):
        assert figures([[0.01, 0.0]] * 12)["waited_for_rank"] == 1
    assert not caplog.text
