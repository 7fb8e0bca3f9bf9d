"""However a group ends, its unfinished operations end too; they neither hang nor use memory that has been freed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from comm.ranks import Ranks

ENDINGS = "comm.ending_cases"


@pytest.fixture(scope="module")
def job() -> Iterator[Ranks]:
    ranks = Ranks("ccl", 2, {"STOKER_CCL_BACKEND": "compiled"})
    yield ranks
    assert ranks.close() == [0, 0]


@pytest.mark.parametrize("met", [False, True])
def test_destroying_a_group_ends_a_pending_receive(job: Ranks, met: bool) -> None:
    errors = job.run("destroy_while_receiving", met, module=ENDINGS)
    assert "destroyed" in errors[1], errors


@pytest.mark.parametrize("asynchronous", [False, True])
def test_abort_from_another_thread_ends_a_blocked_operation(job: Ranks, asynchronous: bool) -> None:
    errors = job.run("abort_while_blocked", asynchronous, module=ENDINGS)[0]
    assert len(errors) == 3
    assert all("rank 0 aborted the group" in one for one in errors), errors


def test_destroying_a_group_waits_for_another_threads_operation(job: Ranks) -> None:
    assert job.run("destroy_while_another_thread_reduces", module=ENDINGS) == [2.0, 2.0]


def test_destroying_a_group_in_a_forked_child_does_not_affect_the_parent(job: Ranks) -> None:
    assert job.run("destroy_in_a_forked_child", module=ENDINGS) == [4.0, 4.0]


def test_a_reduction_that_a_leader_cannot_do_raises_on_all_ranks() -> None:
    common = {"STOKER_CCL_BACKEND": "compiled", "STOKER_CCL_ENGINE": "shm", "TIMEOUT": "300"}
    ranks = Ranks("ccl", 4, [{**common, "STOKER_CCL_HOST": f"host{rank // 2}"} for rank in range(4)])
    try:
        for mean, small in ranks.run("reduce_what_a_leader_cannot", module=ENDINGS):
            assert "avg of" in mean
            assert "is not defined" in mean
            assert "communication with another host failed" in small
    finally:
        ranks.kill()
