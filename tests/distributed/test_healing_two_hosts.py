"""`stoker launch --heal` on several hosts: a rank that is killed is replaced; a host that is lost takes part again once it is
started again, or a spare one in its place, with the state from the memory of the others. With a range of machines the job
continues without it, from the last checkpoint."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from distributed.test_healing import SCRIPT, TRAINING, evaluations, processes, require_healed, train, weights
from launch.live import STOKER, environment
from rig import Rig

pytestmark = [pytest.mark.part("healing"), pytest.mark.root, pytest.mark.netns]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the same training by two ranks of one host."""
    folder = tmp_path_factory.mktemp("undisturbed")
    done = train(folder, 2, "--ddp_backend", "gloo", heal=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def start(rig: Rig, host: str, machines: list[str], folder: Path, *words: str) -> subprocess.Popen[str]:
    options = ["launch", *machines, "-ppn", "1", "--oversubscribe", "--heal"]
    env = environment({"STOKER_LAUNCH_SILENCE": "5", "OMP_NUM_THREADS": "1"})
    return rig.start(host, [*STOKER, *options, SCRIPT, "--output_dir", str(folder), *TRAINING, *words], env=env)


def fixed(rig: Rig, host: str | None) -> list[str]:
    """The options of a host with a number; of one that has none, if `host` is None."""
    number = ["--machine_rank", str(rig.hosts.index(host))] if host else []
    return ["--num_machines", "2", *number, "--main_process_ip", rig.address("alpha"), "--main_process_port", "29500"]


def wait_for(file: Path, process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 300
    while not file.exists() and time.monotonic() < end and process.poll() is None:
        time.sleep(0.05)
    assert file.exists(), process.communicate()[1][-3000:]


@pytest.mark.parametrize(("backend", "kill"), [("ccl", "1:backward:4"), ("gloo", "0:forward:4")])
def test_a_rank_of_one_host_is_replaced(undisturbed: Path, tmp_path: Path, backend: str, kill: str) -> None:
    folder = tmp_path / "out"
    with Rig(2) as rig:
        words = ["--ddp_backend", backend, "--kills", kill]
        both = [start(rig, host, fixed(rig, host), folder, *words) for host in rig.hosts]
        outputs = [process.communicate(timeout=400) for process in both]
        assert not rig.leftovers()
    codes = [process.returncode for process in both]
    done = subprocess.CompletedProcess([], max(codes), "", "".join(errors for _, errors in outputs))
    require_healed(done, folder, undisturbed, [int(kill[0])], 1e-5)


def require_healed_from_memory(folder: Path, undisturbed: Path, errors: str, lost: str) -> None:
    assert f"{lost} is gone; waiting up to 600 s until it is started again" in errors
    assert "rank 1 (with its machine) was lost after step 7; a new process took its place" in errors
    assert "resuming from" not in errors
    assert [len(set(processes(folder, rank))) for rank in (0, 1)] == [1, 2], "a process was started that was not needed"
    for rank in (0, 1):
        ours, theirs = weights(folder, rank), weights(undisturbed)
        assert max(float((ours[name] - theirs[name]).abs().max()) for name in theirs) <= 1e-5
    assert evaluations(folder) == pytest.approx(evaluations(undisturbed), abs=1e-5)


@pytest.mark.parametrize("backend", ["ccl", "gloo"])
def test_a_host_whose_launch_was_killed_and_started_again_takes_the_training_from_the_memory_of_the_other(
    undisturbed: Path, tmp_path: Path, backend: str
) -> None:
    folder = tmp_path / "out"
    with Rig(2) as rig:
        words = ["--ddp_backend", backend, "--hang_at", "7"]
        both = [start(rig, host, fixed(rig, host), folder, *words) for host in rig.hosts]
        wait_for(folder / "hangs", both[0])
        both[1].kill()  # its ranks die with it; alpha gets no message
        both[1].communicate()
        again = start(rig, "beta", fixed(rig, "beta"), folder, *words)
        outputs = [process.communicate(timeout=400)[1] for process in (both[0], again)]
        assert [both[0].returncode, again.returncode] == [0, 0], outputs
        assert not rig.leftovers()
    require_healed_from_memory(folder, undisturbed, outputs[0], "machine 1 (beta)")
    assert "machine 1 (beta) has joined; its ranks continue from the memory of the others" in outputs[0]


@pytest.mark.parametrize("backend", ["ccl", "gloo"])
def test_a_spare_host_takes_the_place_of_one_that_lost_power(undisturbed: Path, tmp_path: Path, backend: str) -> None:
    folder = tmp_path / "out"
    with Rig(3) as rig:
        words = ["--ddp_backend", backend, "--hang_at", "7"]
        both = [start(rig, host, fixed(rig, host), folder, *words) for host in ("alpha", "beta")]
        wait_for(folder / "hangs", both[0])
        spare = start(rig, "gamma", fixed(rig, None), folder, *words)
        rig.kill("beta")
        outputs = [process.communicate(timeout=400)[1] for process in (both[0], spare)]
        both[1].communicate()
        assert [both[0].returncode, spare.returncode] == [0, 0], outputs
        assert not rig.leftovers()
    require_healed_from_memory(folder, undisturbed, outputs[0], "machine 1 (beta)")
    assert "machine 2 (gamma) has joined; its ranks continue from the memory of the others" in outputs[0]


def test_a_job_with_a_range_of_machines_goes_on_without_a_host_that_lost_power(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    with Rig(2) as rig:
        machines = ["--nnodes", "1:2", "--rdzv_endpoint", f"{rig.address('alpha')}:29500"]
        both = [start(rig, host, machines, folder, "--ddp_backend", "gloo", "--hang_at", "7") for host in rig.hosts]
        wait_for(folder / "hangs", both[0])
        rig.kill("beta")
        errors = both[0].communicate(timeout=400)[1]
        both[1].communicate()
        assert both[0].returncode == 0, errors[-3000:]
        assert not rig.leftovers()
    assert "(beta) is gone; continuing with 1 of 2 machines" in errors
    assert f"resuming from {folder / 'checkpoint-6'}" in errors
    assert (folder / "checkpoint-9" / "stoker_manifest.json").exists()
