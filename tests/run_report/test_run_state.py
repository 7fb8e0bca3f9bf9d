"""A run is called running, silent, killed, stopped or finished for reasons that hold on the machine that looks."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from stoker.process_life import facts_of, is_alive
from stoker.run_report.log import Run
from stoker.run_report.run_state import seconds_left, state_of

SLEEP = [sys.executable, "-c", "import sys; sys.stdin.read()"]


def run_of(*entries: dict[str, Any]) -> Run:
    run = Run()
    for entry in entries:
        run.add(entry)
    run.settle()
    return run


def test_a_process_is_alive_until_it_ends_however_it_ends() -> None:
    process = subprocess.Popen(SLEEP, stdin=subprocess.PIPE)
    facts = facts_of(process.pid)
    assert is_alive(facts) is True
    assert is_alive({**facts, "started": "1"}) is False, "its id belongs to another process now"
    assert is_alive({**facts, "space": "another machine"}) is None
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert is_alive(facts) is False, "a process that was not yet waited for has ended, too"
    process.communicate()
    assert is_alive(facts) is False


@pytest.mark.parametrize("facts", [None, {}, {"id": -1}, {"id": 1 << 80, "started": "1"}, {"id": True}])
def test_nothing_is_known_of_a_process_without_facts(facts: Any) -> None:
    space = facts_of(os.getpid())["space"]
    assert is_alive(facts) is None
    assert is_alive({"space": space, **(facts or {})}) is None


def test_a_killed_run_is_told_from_one_that_trains_by_its_process() -> None:
    process = subprocess.Popen(SLEEP, stdin=subprocess.PIPE)
    run = run_of({"kind": "start", "process": facts_of(process.pid)}, {"kind": "step", "step": 1234})
    assert state_of(run, quiet_for=1e6).name == "running", "a long evaluation logs nothing"
    process.kill()
    process.communicate()
    state = state_of(run, quiet_for=0.0)
    assert (state.name, state.details) == ("killed", "its process ended without finishing, after step 1,234")
    run.add({"kind": "start", "process": facts_of(os.getpid())})
    assert state_of(run, quiet_for=0.0).name == "running", "it was resumed"


def test_a_run_on_another_machine_is_silent_after_several_of_its_usual_pauses() -> None:
    run = run_of({"kind": "start", "time": 0.0}, *({"kind": "step", "step": n, "time": 100.0 * n} for n in (1, 2, 3)))
    assert state_of(run, quiet_for=300.0).name == "running"
    state = state_of(run, quiet_for=3600.0)
    assert (state.name, state.label) == ("silent", "no news")
    assert state.details == "the last entry is 1 h 0 min old: the run may have been killed"


def test_the_end_is_what_the_log_says() -> None:
    dead = {"id": 1, "started": "0", "space": facts_of(1)["space"]}
    assert state_of(Run(), 0.0).name == "waiting"
    finished = run_of({"kind": "start", "process": dead}, {"kind": "end", "reason": "finished"})
    assert (state_of(finished, 1e9).name, state_of(finished, 1e9).tone) == ("finished", "good")
    stopped = run_of({"kind": "start", "process": dead}, {"kind": "end", "reason": "interrupted"})
    assert (state_of(stopped, 0.0).name, state_of(stopped, 0.0).details) == ("stopped", "interrupted")


def test_time_left_follows_the_pace_since_the_last_start() -> None:
    entries: list[dict[str, Any]] = [{"kind": "start", "time": 0.0}, {"kind": "model", "steps": 100, "time": 50.0}]
    assert seconds_left(run_of(*entries), 0.0) is None
    entries += [{"kind": "step", "step": step, "time": 50.0 + step} for step in range(1, 11)]
    assert seconds_left(run_of(*entries), 0.0) == pytest.approx(90.0), "a second a step; loading does not count"
    assert seconds_left(run_of(*entries), 30.0) == pytest.approx(60.0)
    entries += [{"kind": "start", "resumed_at": 5, "time": 1000.0}]
    assert seconds_left(run_of(*entries), 0.0) is None
    entries += [{"kind": "step", "step": step, "time": 1000.0 + 4 * step} for step in (6, 7)]
    assert seconds_left(run_of(*entries), 0.0) == pytest.approx(4 * 93)
    entries += [{"kind": "evaluation", "step": 7, "time": 1038.0}]
    assert seconds_left(run_of(*entries), 0.0) == pytest.approx(4 * 93 - 10), "the evaluation has taken time"


def test_the_duration_of_a_run_leaves_out_the_time_between_its_parts() -> None:
    run = run_of(
        {"kind": "start", "time": 0.0}, {"kind": "step", "step": 1, "time": 10.0},
        {"kind": "start", "resumed_at": 0, "time": 5000.0}, {"kind": "step", "step": 1, "time": 5007.0},
        {"kind": "end", "reason": "finished", "time": 5008.0}, {"kind": "evaluation", "step": 1, "time": 5100.0},
    )  # fmt: skip
    assert run.seconds == 18.0
    assert run.longest_gap == 10.0
    assert run.first_time == 0.0
