"""Token-balanced batches: the same examples as without balancing, evenly divided."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.distributed.balance import TokenBalancedSampler, deal


@given(st.lists(st.integers(0, 512), max_size=60), st.integers(1, 7))
def test_every_example_is_assigned_once(lengths: list[int], ranks: int) -> None:
    hands = deal(lengths, ranks)
    assert sorted(i for hand in hands for i in hand) == list(range(len(lengths)))
    assert max(map(len, hands)) - min(map(len, hands)) <= 1


def test_ranks_get_nearly_the_same_number_of_tokens() -> None:
    generator = random.Random(0)
    worst_dealt, worst_plain = 0.0, 0.0
    for _ in range(50):
        lengths = [generator.randint(20, 384) for _ in range(48)]
        sums = [sum(lengths[i] for i in hand) for hand in deal(lengths, 4)]
        plain = [sum(lengths[rank::4]) for rank in range(4)]
        worst_dealt = max(worst_dealt, max(sums) / (sum(sums) / 4))
        worst_plain = max(worst_plain, max(plain) / (sum(plain) / 4))
    assert worst_dealt < 1.03 < 1.2 < worst_plain


def samplers(count: int, ranks: int, **options: object) -> list[TokenBalancedSampler]:
    lengths = [(i * 37) % 101 + 1 for i in range(count)]
    return [TokenBalancedSampler(lengths, 3, ranks, rank, **options) for rank in range(ranks)]  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [24, 25, 29, 5])
@pytest.mark.parametrize("drop_last", [True, False])
def test_every_global_batch_has_the_same_examples_as_without_balancing(count: int, drop_last: bool) -> None:
    group = samplers(count, 4, drop_last=drop_last)
    batches = [list(sampler) for sampler in group]
    assert len({len(mine) for mine in batches}) == 1 == len({len(sampler) for sampler in group})
    order = group[0].order()
    for step, parts in enumerate(zip(*batches, strict=True)):
        whole = order[step * 12 : (step + 1) * 12]
        assert {i for part in parts for i in part} - {order[0]} == set(whole) - {order[0]}
        assert all(parts)


def test_epochs_differ_and_are_reproducible() -> None:
    first, again = samplers(48, 2)[0], samplers(48, 2)[0]
    assert list(first) == list(again)
    again.set_epoch(1)
    assert list(first) != list(again)


def test_a_resumed_epoch_continues_where_it_stopped() -> None:
    sampler, resumed = samplers(48, 2)[1], samplers(48, 2)[1]
    sampler.set_epoch(3)
    whole = list(sampler)
    resumed.load_state_dict(sampler.state_dict(), steps=5)
    assert list(resumed) == whole[5:]
    assert list(resumed) == whole  # only the resumed pass is short
