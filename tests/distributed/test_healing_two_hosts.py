"""`stoker launch --heal` on two hosts: a rank that is killed is replaced; after the loss of a whole host the job waits for it, or
continues without it, from the last checkpoint."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from distributed.test_healing import SCRIPT, TRAINING, require_healed, train, weights
from launch.live import STOKER, environment
from rig import Rig

pytestmark = [pytest.mark.root, pytest.mark.netns]


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


def fixed(rig: Rig, host: str) -> list[str]:
    number = str(rig.hosts.index(host))
    return ["--num_machines", "2", "--machine_rank", number, "--main_process_ip", rig.address("alpha"),
            "--main_process_port", "29500"]  # fmt: skip


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


def test_a_job_waits_for_a_host_whose_launch_was_killed_and_goes_on_from_the_last_checkpoint(
    undisturbed: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    with Rig(2) as rig:
        words = ["--ddp_backend", "gloo", "--hang_at", "7"]
        both = [start(rig, host, fixed(rig, host), folder, *words) for host in rig.hosts]
        wait_for(folder / "hangs", both[0])
        both[1].kill()  # its ranks die with it; alpha gets no message
        both[1].communicate()
        again = start(rig, "beta", fixed(rig, "beta"), folder, *words)
        outputs = [process.communicate(timeout=400)[1] for process in (both[0], again)]
        assert [both[0].returncode, again.returncode] == [0, 0], outputs
        assert not rig.leftovers()
    assert "machine 1 (beta) is gone; waiting up to 600 s until it is started again" in outputs[0]
    assert f"resuming from {folder / 'checkpoint-6'}" in outputs[0]
    for rank in (0, 1):
        ours, theirs = weights(folder, rank), weights(undisturbed)
        assert max(float((ours[name] - theirs[name]).abs().max()) for name in theirs) <= 1e-5


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
