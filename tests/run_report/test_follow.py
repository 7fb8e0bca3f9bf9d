"""A follower shows what the log says at every moment: while lines are written, after cuts, restarts and resumed runs."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from attack.run_logs import not_a_file
from stoker.run_report import follow
from stoker.run_report.follow import LogFollower
from stoker.run_report.log import NAME, Run, RunLog, read_run


def line(kind: str, **values: Any) -> bytes:
    return json.dumps({"kind": kind, "time": 1000.0, **values}, ensure_ascii=False).encode() + b"\n"


def steps(run: Run) -> list[int]:
    return [one["step"] for one in run.steps]


def test_a_log_that_grows_byte_by_byte_is_read_line_by_line(tmp_path: Path) -> None:
    whole = line("start", task="qa", title="Größe") + b"".join(line("step", step=n, loss=1.0) for n in (1, 2, 3))
    follower = LogFollower(tmp_path)
    assert follower.poll()
    assert "no run.jsonl" in follower.problem
    with open(tmp_path / NAME, "wb", buffering=0) as file:
        for position in range(len(whole)):
            file.write(whole[position : position + 1])
            follower.poll()
            assert follower.run.bad_lines == 0, "a line that is being written is not a damaged one"
            assert follower.run.lines == whole[: position + 1].count(b"\n")
    assert follower.run.start["title"] == "Größe"
    assert steps(follower.run) == [1, 2, 3]
    assert follower.problem == ""
    assert not follower.poll(), "nothing is new"


def test_the_torn_line_of_a_killed_run_is_skipped_when_the_next_begins(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(line("start") + line("step", step=1) + line("step", step=2) + b'{"kind": "st')
    follower = LogFollower(tmp_path)
    follower.poll()
    RunLog(tmp_path).write("start", resumed_at=1)
    RunLog(tmp_path).write("step", step=2, loss=0.5)
    follower.poll()
    assert steps(follower.run) == [1, 2]
    assert follower.run.steps[-1]["loss"] == 0.5, "the repeated step counts once"
    assert follower.run.resumed_at == [1]
    assert follower.run.bad_lines == 1
    assert follower.run.steps == read_run(tmp_path).steps


def test_a_run_that_starts_over_is_read_from_its_beginning(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    for step in range(5):
        log.write("step", step=step)
    follower = LogFollower(tmp_path)
    follower.poll()
    log.start_over()
    follower.poll()
    assert steps(follower.run) == [0, 1, 2, 3, 4], "until the new log is there, the page keeps the old one"
    for step in range(10, 20):
        log.write("step", step=step)
    follower.poll()
    assert steps(follower.run) == list(range(10, 20))


@pytest.mark.parametrize("length", [1, 50], ids=["shorter", "longer"])
def test_a_log_that_was_rewritten_in_place_is_read_again(tmp_path: Path, length: int) -> None:
    path = tmp_path / NAME
    path.write_bytes(b"".join(line("step", step=n) for n in range(9)))
    follower = LogFollower(tmp_path)
    follower.poll()
    before = os.stat(path).st_ino
    with open(path, "r+b") as file:
        file.truncate(0)
        file.write(b"".join(line("step", step=n) for n in range(100, 100 + length)))
    assert os.stat(path).st_ino == before
    follower.poll()
    assert steps(follower.run) == list(range(100, 100 + length))


def test_shares_refer_to_one_peak_however_often_the_log_is_read(tmp_path: Path) -> None:
    follower, log = LogFollower(tmp_path), RunLog(tmp_path)
    for step, peak in ((1, 1e11), (2, 2e11), (3, 2e11)):
        log.write("step", step=step, share_of_peak=0.5, peak=peak)
        follower.poll()
    assert [one["share_of_peak"] for one in follower.run.steps] == [0.25, 0.5, 0.5]
    assert [one["share_of_peak"] for one in read_run(tmp_path).steps] == [0.25, 0.5, 0.5]


def test_the_memory_of_a_long_run_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "ENTRIES_KEPT", 100)
    monkeypatch.setattr(follow, "ROWS_KEPT", 100)
    follower = LogFollower(tmp_path)
    with open(tmp_path / NAME, "ab", buffering=0) as file:
        for first in range(0, 5000, 50):
            for step in range(first, first + 50):
                file.write(line("step", step=step) + line("waits", step=step, rows=[[step, 0, 0.0, 0.5]]))
            follower.poll()
            assert max(len(follower.run.steps), len(follower.run.waits)) <= 100
    found = steps(follower.run)
    assert found == sorted(found)
    assert found[0] < 1500, "the whole run is still covered"
    assert found[-25:] == list(range(4975, 5000)), "what is new is shown in full"


def test_a_line_without_end_is_skipped_and_what_follows_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "PIECE", 256)
    monkeypatch.setattr(follow, "LONGEST_LINE", 1024)
    (tmp_path / NAME).write_bytes(line("start") + b'{"kind": "' + b"x" * 5000 + b'"}\n' + line("step", step=1))
    follower = LogFollower(tmp_path)
    follower.poll()
    assert steps(follower.run) == [1]
    assert (follower.run.lines, follower.run.bad_lines) == (3, 1)


@pytest.mark.parametrize("name", not_a_file())
def test_what_is_not_a_regular_file_is_a_problem_and_never_blocks(tmp_path: Path, name: str) -> None:
    if name == "not readable" and os.geteuid() == 0:
        pytest.skip("root can read everything")
    not_a_file()[name](tmp_path / NAME)
    follower = LogFollower(tmp_path)
    follower.poll()
    assert follower.problem
    assert follower.run == Run()


def test_quiet_time_counts_from_the_last_entry_of_a_log_that_is_opened_late(tmp_path: Path) -> None:
    entry = {"kind": "start", "time": time.time() - 500}
    (tmp_path / NAME).write_text(json.dumps(entry) + "\n")
    follower = LogFollower(tmp_path)
    follower.poll()
    assert 490 < follower.quiet_for < 600
    RunLog(tmp_path).write("step", step=1)
    follower.poll()
    assert follower.quiet_for < 60
