"""Batches by tokens or length: every row once per epoch, within the budget, the same for the same seed and epoch."""

from __future__ import annotations

import numpy as np
import pytest

from stoker.hf.batches import EpochBatches

LENGTHS = np.random.default_rng(0).integers(4, 60, 333)


@pytest.mark.parametrize(
    "settings", [{"tokens": 200}, {"rows": 7}, {"rows": 7, "similar": True}, {"tokens": 90, "similar": True}]
)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_row_comes_once_in_every_epoch_and_all_ranks_get_as_many_batches(settings: dict, world: int) -> None:
    ranks = [EpochBatches(LENGTHS, seed=3, rank=rank, world_size=world, **settings) for rank in range(world)]
    for epoch in range(3):
        seen: list[int] = []
        for batches in ranks:
            batches.set_epoch(epoch)
            found = list(batches)
            assert len(found) == len(batches) == len(ranks[0])
            seen += [row for batch in found for row in batch]
        assert sorted(seen) == list(range(len(LENGTHS)))


def test_the_first_epoch_keeps_to_the_budget() -> None:
    for batch in EpochBatches(LENGTHS, tokens=200, seed=1):
        assert LENGTHS[batch].sum() <= 200


def test_similar_lengths_come_together() -> None:
    def spread(similar: bool) -> float:
        return float(
            np.mean([np.ptp(LENGTHS[batch]) for batch in EpochBatches(LENGTHS, rows=8, similar=similar, seed=1)])
        )

    assert spread(True) < 0.3 * spread(False)


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    first, again, other = (EpochBatches(LENGTHS, tokens=150, seed=seed) for seed in (1, 1, 2))
    list(first)
    first.set_epoch(1)
    again.set_epoch(1)
    assert list(first) == list(again)
    assert list(first) != list(other)


def test_a_row_longer_than_the_budget_is_named() -> None:
    with pytest.raises(ValueError, match="tokens_per_batch is 30, but one row alone has 59 tokens"):
        EpochBatches(LENGTHS, tokens=30)
