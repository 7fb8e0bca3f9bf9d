"""If a rank dies, is missing or disagrees, the others soon raise an error that names it, and nothing is left behind."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from comm.ranks import Ranks

FAULTS = "comm.fault_cases"


def segments() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("stoker-*") if path.is_file()}


def left_behind(before: set[str], seconds: float = 10.0) -> set[str]:
    """New names that stay. Those of a job that another test is just starting have only a moment to live."""
    end = time.monotonic() + seconds
    found = segments() - before
    while found and time.monotonic() < end:
        time.sleep(0.1)
        found &= segments()
    return found


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    before = segments()
    yield
    assert not left_behind(before)


@pytest.fixture
def jobs() -> Iterator[list[Ranks]]:
    started: list[Ranks] = []

    class Start(list[Ranks]):
        def __call__(self, size: int, **environment: str) -> Ranks:
            started.append(Ranks("ccl", size, {"STOKER_CCL_BACKEND": "compiled", **environment}))
            return started[-1]

    yield Start()
    for job in started:
        job.kill()


def test_a_killed_rank_is_named_by_the_others(jobs) -> None:  # type: ignore[no-untyped-def]
    job = jobs(3)
    job.start("reduce_forever", module=FAULTS)
    time.sleep(1.0)
    os.kill(job.processes[1].pid, signal.SIGKILL)
    for rank in (0, 2):
        state, message = job.finish(rank, 20)
        assert state == "ok"
        assert re.search(r"rank 1 \(pid \d+\) has died", message), message


def test_a_missing_rank_is_named_after_the_timeout(jobs) -> None:  # type: ignore[no-untyped-def]
    job = jobs(2)
    job.start("stay_away", 1, 3.0, module=FAULTS)
    state, message = job.finish(0, 30)
    assert state == "ok"
    assert re.search(r"rank 0 waited 1 s in allreduce sum of 10 float32 .* for rank 1", message), message


def test_an_asynchronous_operation_that_fails_raises_in_wait(jobs) -> None:  # type: ignore[no-untyped-def]
    job = jobs(2)
    job.start("fail_later", 1, module=FAULTS)
    state, message = job.finish(0, 30)
    assert state == "ok"
    assert re.search(r"wait: .*rank 0 waited 1 s in allreduce .* for rank 1", message), message


def test_a_rank_that_is_ten_times_slower_only_delays_the_others(jobs) -> None:  # type: ignore[no-untyped-def]
    job = jobs(3)
    assert job.run("slow_down", 2, module=FAULTS) == [[3.0] * 20] * 3


@pytest.mark.parametrize("how", ["size", "dtype", "operation", "root"])
def test_ranks_in_different_operations_raise(jobs, how: str) -> None:  # type: ignore[no-untyped-def]
    job = jobs(2)
    job.start("disagree", how, module=FAULTS)
    messages = [job.finish(rank, 30)[1] for rank in range(2)]
    assert any("the ranks disagree on operation" in message for message in messages), messages
    assert "no error" not in messages


def test_two_jobs_do_not_interfere(jobs) -> None:  # type: ignore[no-untyped-def]
    first, second = jobs(2), jobs(2)
    for job in (first, second):
        job.start("allreduce_is_the_same_on_all_ranks")
    for job in (first, second):
        for rank in range(2):
            assert job.finish(rank)[0] == "ok"


def test_segments_have_no_name_once_all_are_attached(jobs) -> None:  # type: ignore[no-untyped-def]
    before = segments()
    for kind in ("memfd", "named"):
        job = jobs(2, STOKER_CCL_SHM=kind)
        names = job.run("segments", module=FAULTS)[0]
        assert names
        assert all("(deleted)" in name for name in names), names
        assert not left_behind(before)
