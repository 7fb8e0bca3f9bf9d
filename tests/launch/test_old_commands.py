"""Every command of the old guides, with unmodified scripts: those that fail without Stoker run, or give a clear error."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from live import SCRIPTS, STOKER, environment, launch, reports

from parts import rest_in
from rig import GUIDES_MPIRUN, Rig, mpi_environment
from stoker.machine.network import free_port

QA, NLP = str(SCRIPTS / "qa_style.py"), str(SCRIPTS / "nlp_style.py")
TWO = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
OFFLINE = {"HF_HUB_OFFLINE": "1"}


def qa_words(path: Path) -> list[str]:
    return [
        "--output_dir",
        str(path),
        "--report_to",
        "none",
        "--per_device_train_batch_size",
        "8",
        "--num_train_epochs",
        "1",
    ]


def test_one_process_with_use_ipex_bf16_no_cuda(tmp_path: Path) -> None:
    words = ["--use_ipex", "--bf16", "--no_cuda", "--overwrite_output_dir", "--warmup_ratio", "0.1"]
    done = launch(QA, *qa_words(tmp_path), *words, env=OFFLINE)
    assert done.returncode == 0, done.stderr
    report = reports(done.stdout)[0]
    assert (report["device"], report["bf16"], report["steps"], report["warmup_steps"]) == ("cpu", True, 4, 10)
    assert "stoker" in report["origins"]
    assert report["threads"] == len(report["cores"])  # not one, as `accelerate launch --cpu` has it
    since_5 = () if metadata.version("transformers").startswith("4.") else ("no_cuda", "warmup_ratio")
    for word in ("use_ipex", *since_5):
        assert done.stderr.count(f"{word}: ") == 1, done.stderr


def test_one_process_with_use_cpu_and_no_ipex_is_left_alone(tmp_path: Path) -> None:
    done = launch("--no-ipex", QA, *qa_words(tmp_path), "--use_cpu", env=OFFLINE)
    assert done.returncode == 0, done.stderr
    assert "stoker" not in reports(done.stdout)[0]["origins"]


def test_the_guides_yaml_for_one_process(tmp_path: Path) -> None:
    path = tmp_path / "default_config.yaml"
    path.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\ndowncast_bf16: 'no'\nipex_config:\n  ipex: true\n"
        "machine_rank: 0\nmain_training_function: main\nmixed_precision: bf16\nnum_machines: 1\nnum_processes: 1\n"
        "rdzv_backend: static\nsame_network: true\ntpu_env: []\ntpu_use_cluster: false\ntpu_use_sudo: false\nuse_cpu: true\n"
    )
    done = launch("--config_file", str(path), NLP, env=OFFLINE)
    assert done.returncode == 0, done.stderr
    report = reports(done.stdout)[0]
    assert (report["precision"], report["device"], report["world"]) == ("bf16", "cpu", 1)
    assert "stoker" in report["origins"]


@TWO
@pytest.mark.part("launch")
def test_the_guides_yaml_for_many_machines_scaled_down(tmp_path: Path) -> None:
    """With the flags that today's accelerate refuses or ignores: --ipex, --mpirun_ccl, MULTI_CPU without mpirun."""
    path = tmp_path / "default_config.yaml"
    path.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_CPU\nipex_config:\n  ipex: true\nmachine_rank: 0\n"
        "main_training_function: main\nmixed_precision: 'no'\nmpirun_config:\n  mpirun_ccl: '0'\nnum_machines: 1\n"
        "num_processes: 2\nrdzv_backend: static\nsame_network: true\nuse_cpu: true\n"
    )
    done = launch("--config_file", str(path), "--ipex", "--mpirun_ccl", "0", "--backend", "ccl", NLP, env=OFFLINE)
    assert done.returncode == 0, done.stderr
    found = reports(done.stdout)
    assert set(found) == {0, 1}
    assert all(report["gathered"] == [0, 1] and report["world"] == 2 for report in found.values())
    assert found[0]["threads"] == len(found[0]["cores"])
    assert found[0]["backend"] in ("ccl", "gloo")
    assert found[0]["backend"] == "ccl" or done.stderr.count("backend ccl is not available, so gloo is used") == 1


@TWO
@pytest.mark.parametrize("address", rest_in("launch", ["variables", "tcp"]))
def test_a_script_for_the_oneccl_bindings_runs_with_its_children(address: str) -> None:
    """As under mpirun it reads PMI_RANK and PMI_SIZE and chooses a port; it imports the old packages in its children."""
    done = launch("-n", "2", str(SCRIPTS / "oneccl_script.py"), address, str(free_port()))
    assert done.returncode == 0, done.stderr
    assert "rank 0 of 2: [2.0, 2.0, 2.0] {'spawn': 1, 'forkserver': 1, 'loader': [1, 2, 3, 4]}" in done.stdout
    assert "rank 1 of 2: [2.0, 2.0, 2.0] {}" in done.stdout


@TWO
@pytest.mark.part("launch")
@pytest.mark.mpi
def test_mpirun_with_ddp_backend_ccl_is_one_training_and_not_two(tmp_path: Path) -> None:
    import subprocess

    env = environment({**mpi_environment("impi"), **OFFLINE})
    words = ["mpirun", "-n", "2", "-genv", "OMP_NUM_THREADS=1", *STOKER, "launch", QA, *qa_words(tmp_path)]
    done = subprocess.run(
        [*words, "--ddp_backend", "ccl", "--use_ipex", "--ddp_timeout", "60"],
        env=env, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = reports(done.stdout)
    assert set(found) == {0, 1}
    assert all(report["world"] == 2 and report["steps"] == 2 and report["threads"] == 1 for report in found.values())
    assert found[0]["backend"] == "ccl" or "gloo is used" in done.stderr


@pytest.fixture
def rig() -> Iterator[Rig]:
    with Rig(2) as made:
        yield made


@pytest.mark.part("launch")
@pytest.mark.mpi
@pytest.mark.netns
@pytest.mark.root
def test_mpirun_with_a_hostfile_trains_on_two_hosts(rig: Rig) -> None:
    env = environment({**mpi_environment("impi"), **OFFLINE})
    words = [*GUIDES_MPIRUN, rig.hostfile(), *STOKER, "launch", NLP]
    done = rig.run("alpha", words, env=env, timeout=400)
    assert done.returncode == 0, done.stderr
    found = reports(done.stdout)
    assert sorted(found) == [0, 1, 2, 3]
    assert all(report["gathered"] == [0, 1, 2, 3] for report in found.values())
    assert not rig.leftovers()
