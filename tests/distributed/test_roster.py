"""The processes that continue after a rank was lost agree on who they are."""

from __future__ import annotations

import dataclasses
import subprocess
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from stoker.distributed.roster import Roster, RosterFailed, RosterStore
from stoker.process_life import facts_of


def nothing() -> None:
    pass


def agree(
    store: Any, rank: int, size: int = 3, position: tuple[int, int] | None = (4, 0), signal: int | None = None
) -> tuple[RosterStore, Callable[[], Roster]]:
    """Begins to agree in a thread, as each rank does in its process; the second value waits for the roster."""
    side = RosterStore(store, rank, size)
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(side.agree(position, "same", signal, seconds=10, check=nothing))
        except RosterFailed as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def wait() -> Roster:
        thread.join(20)
        if isinstance(found[0], RosterFailed):
            raise found[0]
        return found[0]

    return side, wait


def test_ranks_and_the_new_process_get_the_same_roster() -> None:
    store = dist.HashStore()
    sides = [agree(store, 0), agree(store, 1, position=None, signal=9), agree(store, 2)]
    rosters = [wait() for _, wait in sides]
    assert all(roster.number == 1 for roster in rosters)
    assert len({str(roster.entries) for roster in rosters}) == 1
    assert [entry.rank for entry in rosters[0].lost] == [1]
    assert all(side.is_current(rosters[0]) for side, _ in sides)


def test_the_state_comes_from_the_lowest_rank_of_those_that_are_furthest() -> None:
    store = dist.HashStore()
    positions: list[tuple[int, int] | None] = [None, (4, 1), (5, 0), (5, 0)]
    waits = [agree(store, rank, 4, position, None if position else 9)[1] for rank, position in enumerate(positions)]
    assert {wait().donor.rank for wait in waits} == {2}


def test_without_a_rank_that_has_the_state_there_is_no_donor() -> None:
    store = dist.HashStore()
    waits = [agree(store, rank, 2, None, 9)[1] for rank in range(2)]
    with pytest.raises(RosterFailed, match="no process is left"):
        _ = waits[0]().donor


def test_a_process_that_replaces_a_member_waits_for_the_next_roster() -> None:
    store = dist.HashStore()
    sides = [agree(store, rank) for rank in (0, 1)]
    third, wait = agree(store, 2, position=None, signal=9)
    before = wait()
    assert [one[1]().number for one in sides] == [1, 1]
    # Rank 1 is lost while the group is formed; its replacement finds roster 1, which names the process before it.
    _, late = agree(store, 1, position=None, signal=6)
    while sides[0][0].is_current(before):
        pass
    for side, position, signal in ((sides[0][0], (4, 0), None), (third, None, 9)):
        threading.Thread(
            target=side.agree, args=(position, "same", signal), kwargs={"seconds": 10, "check": nothing}, daemon=True
        ).start()
    after = late()
    assert after.number == 2
    assert [(entry.rank, entry.signal) for entry in after.lost] == [(1, 6), (2, 9)]
    assert after.entries[0].token == before.entries[0].token
    assert after.entries[1].token != before.entries[1].token


def test_a_roster_is_over_when_one_of_its_processes_has_ended() -> None:
    store = dist.HashStore()
    sides = [agree(store, rank, 2) for rank in (0, 1)]
    roster, _ = (wait() for _, wait in sides)
    with subprocess.Popen(["sleep", "60"]) as process:
        other = dataclasses.replace(roster.entries[1], process=facts_of(process.pid))
        with_other = Roster(roster.number, [roster.entries[0], other])
        assert sides[0][0].is_current(with_other)
        process.kill()
        process.wait()
        assert not sides[0][0].is_current(with_other)


def test_a_roster_is_over_when_one_of_its_processes_waits_for_the_next() -> None:
    store = dist.HashStore()
    sides = [agree(store, rank, 2) for rank in (0, 1)]
    roster, _ = (wait() for _, wait in sides)
    with pytest.raises(RosterFailed, match="rank 1 did not come back"):
        sides[0][0].agree((4, 0), "same", None, seconds=0.1, check=nothing)
    assert not sides[1][0].is_current(roster)


def test_a_rank_that_does_not_come_back_is_named() -> None:
    side = RosterStore(dist.HashStore(), 0, 3)
    with pytest.raises(RosterFailed, match=r"rank 1, 2 did not come back within 0 s"):
        side.agree((1, 0), "", None, seconds=0.2, check=nothing)


def test_waiting_ends_with_what_the_check_raises() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        RosterStore(dist.HashStore(), 0, 2).agree((1, 0), "", None, seconds=5, check=interrupt)
