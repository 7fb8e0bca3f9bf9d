"""Batches by tokens or length: every row once per epoch, within the budget, the same for the same seed and epoch."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from stoker.hf.batches import EpochBatches

LENGTHS = np.random.default_rng(0).integers(4, 60, 333)


@pytest.mark.parametrize(
    "settings", [{"tokens": 200}, {"rows": 7}, {"rows": 7, "similar": True}, {"tokens": 90, "similar": True}]
)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_row_occurs_once_per_epoch_and_all_ranks_get_the_same_number_of_batches(
    settings: dict, world: int
) -> None:
    ranks = [EpochBatches(LENGTHS, seed=3, rank=rank, world_size=world, **settings) for rank in range(world)]
    for epoch in range(3):
        seen: list[int] = []
        for batches in ranks:
            batches.set_epoch(epoch)
            found = list(batches)
            assert len(found) == len(batches) == len(ranks[0])
            seen += [row for batch in found for row in batch]
        assert sorted(seen) == list(range(len(LENGTHS)))


@pytest.mark.parametrize("similar", [False, True])
@pytest.mark.parametrize("tokens", [60, 90, 200, 1000])
def test_no_batch_of_any_epoch_exceeds_the_token_budget(tokens: int, similar: bool) -> None:
    more = 0
    for seed in range(6):
        batches = EpochBatches(LENGTHS, tokens=tokens, similar=similar, seed=seed)
        for epoch in range(8):
            batches.set_epoch(epoch)
            more += len(batches._cut(batches._order())) > len(batches)
            found = list(batches)
            assert all(0 < LENGTHS[batch].sum() <= tokens for batch in found)
            assert sorted(row for batch in found for row in batch) == list(range(len(LENGTHS)))
    assert more or (tokens, similar) == (1000, True)  # epochs that are cut into more batches than the first one


def test_rows_that_fit_only_as_in_the_first_epoch_do_not_exceed_the_budget() -> None:
    lengths = np.array([6, 4, 6, 4, 3, 7])  # pairs of 10; the order of the data is the first epoch's
    batches = EpochBatches(lengths, tokens=10, shuffle=False)
    assert len(batches) == 3
    assert [lengths[batch].sum() for batch in batches._even([[0], [1, 4], [2], [3], [5]])] == [10, 10, 10]
    batches._fill = lambda *_: False  # type: ignore[method-assign]
    assert sorted(map(sorted, batches._even([[0], [1, 4], [2], [3], [5]]))) == [[0, 1], [2, 3], [4, 5]]


def test_rows_of_similar_length_share_a_batch() -> None:
    def spread(similar: bool) -> float:
        return float(
            np.mean([np.ptp(LENGTHS[batch]) for batch in EpochBatches(LENGTHS, rows=8, similar=similar, seed=1)])
        )

    assert spread(True) < 0.3 * spread(False)


def test_batches_of_similar_lengths_are_shuffled() -> None:
    lengths = np.random.default_rng(0).integers(5, 500, 400)
    longest = [int(lengths[batch].max()) for batch in EpochBatches(lengths, rows=4, similar=True)]
    falls = sum(later < earlier for earlier, later in pairwise(longest))
    assert 30 < falls < 70, "99 pairs of neighbours; sorted as in stock, nearly all would fall"


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    first, again, other = (EpochBatches(LENGTHS, tokens=150, seed=seed) for seed in (1, 1, 2))
    list(first)
    first.set_epoch(1)
    again.set_epoch(1)
    assert list(first) == list(again)
    assert list(first) != list(other)


def test_a_row_longer_than_the_budget_is_refused() -> None:
    with pytest.raises(ValueError, match="tokens_per_batch is 30, but one row alone has 59 tokens"):
        EpochBatches(LENGTHS, tokens=30)
