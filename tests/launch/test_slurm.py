"""A real Slurm with two nodes that differ: the emitted batch script, srun of one's own, and what happens when something dies."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from live import HOSTILE, SCRIPTS, reports

from rig import Rig
from rig.slurm import Cluster
from stoker.cli.launch import parse
from stoker.launch.launchers.emit import emit

pytestmark = [pytest.mark.part("engines"), pytest.mark.root, pytest.mark.netns, pytest.mark.slurm]
RANK = str(SCRIPTS / "rank.py")
LIGHT = ["--no-compat", "--no-prefix"]


@pytest.fixture(scope="module")
def slurm() -> Iterator[Cluster]:
    """alpha has the controller; beta has two CPUs, gamma one."""
    with Rig(3) as rig, Cluster(rig, {"beta": 2, "gamma": 1}) as made:
        yield made


def run_emitted(slurm: Cluster, folder: Path, words: list[str]) -> tuple[str, str]:
    """The state in which the job ended, and its log."""
    job = slurm.submit(emit(parse(["--emit", "slurm", "--emit_name", "trial", *words])), folder)
    state = slurm.await_end(job)
    return state, (folder / f"trial-{job}.log").read_text()


def test_the_emitted_script_runs_on_nodes_with_different_numbers_of_cores(slurm: Cluster, tmp_path: Path) -> None:
    arguments = [":", *HOSTILE]
    state, log = run_emitted(slurm, tmp_path, ["--num_machines", "2", *LIGHT, RANK, *arguments])
    found = reports(log)
    assert state == "COMPLETED", log
    assert [found[rank]["host"] for rank in range(2)] == ["beta", "gamma"]
    assert [found[rank]["OMP_NUM_THREADS"] for rank in range(2)] == ["2", "1"]
    assert all(one["argv"] == arguments for one in found.values())
    assert {(one["MASTER_ADDR"], one["MASTER_PORT"], one["WORLD_SIZE"]) for one in found.values()} == {
        ("beta", found[0]["MASTER_PORT"], "2")
    }


def test_the_emitted_script_with_a_number_of_threads_reserves_that_many_cpus(slurm: Cluster, tmp_path: Path) -> None:
    words = ["-n", "2", "--num_cpu_threads_per_process", "1", *LIGHT, RANK]
    state, log = run_emitted(slurm, tmp_path, words)
    found = reports(log)
    assert state == "COMPLETED", log
    assert [found[rank]["OMP_NUM_THREADS"] for rank in range(2)] == ["1", "1"]
    assert found[0]["cores"] != found[1]["cores"]


@pytest.mark.parametrize("binding", [[], ["--cpu-bind=none"], ["--cpus-per-task=1"]])
def test_tasks_of_one_node_have_their_own_cores(slurm: Cluster, binding: list[str]) -> None:
    """Whether srun has pinned each task, or all of them to the same cores."""
    done = slurm.run(["srun", "-N1", "--ntasks-per-node=2", *binding, "stoker", "launch", *LIGHT, RANK])
    found = reports(done.stdout)
    assert sorted(found[rank]["cores"] for rank in range(2)) == [[0], [1]], done.stderr
    assert {one["OMP_NUM_THREADS"] for one in found.values()} == {"1"}


def test_srun_gives_two_tasks_to_one_node_and_one_to_the_other(slurm: Cluster) -> None:
    done = slurm.run(["srun", "-N2", "-n3", "--ntasks-per-node=2", "stoker", "launch", *LIGHT, RANK])
    found = reports(done.stdout)
    facts = [(one["host"], one["LOCAL_RANK"], one["LOCAL_WORLD_SIZE"]) for _, one in sorted(found.items())]
    assert facts == [("beta", "0", "2"), ("beta", "1", "2"), ("gamma", "0", "1")], done.stderr


def test_inside_an_allocation_stoker_calls_srun_itself(slurm: Cluster) -> None:
    words = ["stoker", "launch", "--launcher", "slurm", "--num_machines", "2", *LIGHT, RANK, *HOSTILE]
    done = slurm.run(["salloc", "-N2", "--ntasks-per-node=1", *words])
    found = reports(done.stdout)
    assert sorted(one["host"] for one in found.values()) == ["beta", "gamma"], done.stderr
    assert all(one["argv"] == HOSTILE for one in found.values())


def test_components_of_a_heterogeneous_job_find_rank_0(slurm: Cluster) -> None:
    """Slurm sorts the list of nodes by name, but numbers the ranks by component."""
    launch = ["stoker", "launch", *LIGHT, RANK]
    done = slurm.run(["srun", "-n1", "-wgamma", *launch, ":", "-n1", "-wbeta", *launch])
    found = reports(done.stdout)
    assert [found[rank]["host"] for rank in range(2)] == ["gamma", "beta"], done.stderr
    assert {one["MASTER_ADDR"] for one in found.values()} == {"gamma"}


def test_a_job_whose_rank_dies_is_queued_again_as_often_as_allowed(slurm: Cluster, tmp_path: Path) -> None:
    words = ["--num_machines", "2", "--max_restarts", "1", *LIGHT, RANK, "kill@1"]
    state, log = run_emitted(slurm, tmp_path, words)
    assert state == "FAILED", log
    assert log.count('"host": "gamma"') == 2, "the rank that dies started twice"


def test_after_a_node_failure_the_job_starts_again_and_resumes(slurm: Cluster, tmp_path: Path) -> None:
    script = emit(parse(["--emit", "slurm", "--emit_name", "trial", "--num_machines", "2", "--no-prefix",
                         str(SCRIPTS / "tiny_training.py"), "--output_dir", str(tmp_path / "out"), "0.3"]))  # fmt: skip
    job = slurm.submit(script, tmp_path)
    end = time.monotonic() + 120
    while not (tmp_path / "out" / "checkpoint-4").exists():
        assert time.monotonic() < end, (tmp_path / f"trial-{job}.log").read_text()
        time.sleep(0.1)
    slurm.fail_node("gamma")
    slurm.await_state("gamma", state="down*")
    slurm.return_node("gamma")
    assert slurm.await_end(job) == "COMPLETED"
    log = (tmp_path / f"trial-{job}.log").read_text()
    assert "restarted by the scheduler; resuming from" in log
    assert "FINISHED at step 8" in log
    entries = [json.loads(line) for line in (tmp_path / "out" / "run.jsonl").read_text().splitlines()]
    starts = [entry for entry in entries if entry["kind"] == "start"]
    assert [start["job"] for start in starts] == [f"slurm rig {job}"] * 2
    assert starts[1]["resumed_at"] >= 4
