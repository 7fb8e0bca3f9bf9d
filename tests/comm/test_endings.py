"""However a group ends, what is under way in it ends too, and neither hangs nor touches memory that is gone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from comm.ranks import Ranks

ENDINGS = "comm.ending_cases"


@pytest.fixture(scope="module", params=["auto", "python"])
def job(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    ranks = Ranks("ccl", 2, {"STOKER_CCL_BACKEND": request.param})
    yield ranks
    assert ranks.close() == [0, 0]


@pytest.mark.parametrize("met", [False, True])
def test_a_group_is_destroyed_at_once_while_a_message_is_awaited(job: Ranks, met: bool) -> None:
    told = job.run("destroy_while_receiving", met, module=ENDINGS)
    assert "destroyed" in told[1], told


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_abort_from_another_thread_ends_what_is_blocked(job: Ranks, asynchronous: bool) -> None:
    told = job.run("abort_while_blocked", asynchronous, module=ENDINGS)[0]
    assert len(told) == 3
    assert all("rank 0 aborted the group" in one for one in told), told


def test_what_another_thread_has_begun_is_finished_before_the_group_goes(job: Ranks) -> None:
    assert job.run("destroy_while_another_thread_reduces", module=ENDINGS) == [2.0, 2.0]


def test_a_forked_child_that_destroys_a_group_leaves_it_to_its_parent(job: Ranks) -> None:
    assert job.run("destroy_in_a_forked_child", module=ENDINGS) == [4.0, 4.0]


@pytest.mark.parametrize("backend", ["auto", "python"])
def test_what_leaders_cannot_reduce_raises_on_all_ranks(backend: str) -> None:
    common = {"STOKER_CCL_BACKEND": backend, "STOKER_CCL_ENGINE": "shm", "TIMEOUT": "300"}
    ranks = Ranks("ccl", 4, [{**common, "STOKER_CCL_HOST": f"host{rank // 2}"} for rank in range(4)])
    try:
        for mean, small in ranks.run("reduce_what_a_leader_cannot", module=ENDINGS):
            assert "avg of" in mean
            assert "is not defined" in mean
            assert "the way to another host failed" in small
    finally:
        ranks.kill()
