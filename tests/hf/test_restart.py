"""Detecting a restart that the agent has not counted, and keeping the global batch size with another number of ranks."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from stoker.hf.checkpointing import restart
from stoker.hf.checkpointing.restart import Start, accumulation_for_same_batch

RANK = {"TORCHELASTIC_RUN_ID": "7", "TORCHELASTIC_RESTART_COUNT": "0"}


def write(folder: Path, *entries: dict[str, Any]) -> None:
    (folder / "run.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))


def start(agents: list[int], processes: list[int]) -> dict[str, Any]:
    return {"kind": "start", "time": 1.0, "agents": agents, "processes": processes}


def test_the_same_agent_with_other_ranks_is_a_restart(tmp_path: Path) -> None:
    now = Start.read(tmp_path, RANK)
    assert not now.again
    agents, processes = list(now.agents), list(now.processes)
    assert now.facts == {"agents": agents, "processes": processes}
    write(tmp_path, start([1, *agents], [2, 3]), {"kind": "step", "step": 1})
    assert Start.read(tmp_path, RANK).again
    write(tmp_path, start([1], [2, 3]))
    assert not Start.read(tmp_path, RANK).again, "another launch"
    write(tmp_path, start(agents, processes))
    assert not Start.read(tmp_path, RANK).again, "a script that trains twice"
    write(tmp_path, start(agents, [2]), {"kind": "end", "reason": "finished"})
    assert not Start.read(tmp_path, RANK).again, "that run was over"
    assert Start.read(tmp_path, {**RANK, "TORCHELASTIC_RESTART_COUNT": "2"}).again
    assert Start.read(tmp_path, {}) == Start()


def test_a_job_that_slurm_has_queued_again_is_a_restart(tmp_path: Path) -> None:
    job = {"SLURM_JOB_ID": "12", "SLURM_CLUSTER_NAME": "rig"}
    first = Start.read(tmp_path, job)
    assert not first.again
    assert (first.facts["job"], "agents" in first.facts) == ("slurm rig 12", False)
    before = {**start([], [2, 3]), "job": "slurm rig 12"}
    write(tmp_path, before)
    again = {**job, "SLURM_RESTART_COUNT": "1"}
    assert Start.read(tmp_path, again).reason == " by the scheduler"
    assert not Start.read(tmp_path, job).again, "started twice by hand in one allocation"
    assert not Start.read(tmp_path, {**again, "SLURM_JOB_ID": "13"}).again, "the log is another job's"
    write(tmp_path, before, {"kind": "end", "reason": "finished"})
    assert not Start.read(tmp_path, again).again, "that run was over"
    write(tmp_path, {**before, "processes": first.facts["processes"]})
    assert not Start.read(tmp_path, again).again, "a script that trains twice"


def test_a_failure_before_the_run_began_is_no_restart(tmp_path: Path) -> None:
    again = {**RANK, "TORCHELASTIC_RESTART_COUNT": "1"}
    assert Start.read(tmp_path, again).again, "there is no other run"
    write(tmp_path, start([1], [2, 3]))
    assert not Start.read(tmp_path, again).again


def test_a_complete_job_is_told_from_one_that_was_stopped(tmp_path: Path) -> None:
    job = {"STOKER_RUN_ID": "trial-1"}
    begun = {**start([], [2]), "job": "trial-1"}
    write(tmp_path, begun, {"kind": "end", "reason": "finished"})
    assert not restart.job_is_complete(tmp_path, job), "killed in its last evaluation"
    write(tmp_path, begun, {"kind": "end", "reason": "finished"}, {"kind": "complete"})
    assert restart.job_is_complete(tmp_path, job)
    assert not restart.job_is_complete(tmp_path, {"STOKER_RUN_ID": "trial-2"})
    assert not restart.job_is_complete(tmp_path, {})


@pytest.mark.parametrize("agent", [{}, RANK])
def test_new_pods_of_the_same_job_are_a_restart(tmp_path: Path, agent: dict[str, str]) -> None:
    write(tmp_path, {**start([1], [2, 3]), "job": "trial-1"})
    now = Start.read(tmp_path, {**agent, "STOKER_RUN_ID": "trial-1"})
    assert (now.again, now.times, now.reason) == (True, 0, " by the scheduler")
    assert not Start.read(tmp_path, {**agent, "STOKER_RUN_ID": "trial-2"}).again


def test_the_agent_is_found_among_the_ancestors_of_a_process_started_by_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks and their children have the agent's variables in their environment, the agent has not."""
    import subprocess
    import sys

    code = "from stoker.hf.checkpointing import restart; import os; print(restart._agent(os.getpid()))"
    words = ["sh", "-c", f'{sys.executable} -c "$1"; true', "sh", code]
    done = subprocess.run(words, env={**os.environ, **RANK}, capture_output=True, text=True, check=True)
    assert int(done.stdout) == os.getpid()
    assert restart._identity(os.getpid()) != restart._identity(os.getppid())


@pytest.mark.parametrize(
    ("before", "processes", "steps"),
    [((4, 1, 2), 1, 2), ((4, 2, 1), 2, 1), ((4, 1, 4), 3, None), ((4, 3, 2), 6, 1), ((4, 1, 1), 2, None)],
)
def test_gradient_accumulation_keeps_the_global_batch_size_with_another_number_of_ranks(
    before: tuple[int, int, int], processes: int, steps: int | None
) -> None:
    run = dict(zip(("batch size", "gradient accumulation", "processes"), before, strict=True))
    assert accumulation_for_same_batch(run, 4, processes) == steps
    assert accumulation_for_same_batch({**run, "tokens per batch": 100}, 4, processes) is None
