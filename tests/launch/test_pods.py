"""The commands of the manifests, run on two hosts of the rig in place of pods, with what the operators give to pods.

No cluster can run here. The PET_* variables are those of Kubeflow Trainer 2.3 (pkg/runtime/framework/plugins/torch/torch.go) and
of Training Operator 1.9 (pkg/controller.v1/pytorch/elastic.go), the hostfile is MPI Operator 0.8's.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator

import pytest
import yaml
from live import HOSTILE, SCRIPTS, STOKER, environment, reports

from rig import MPIS, Rig, mpi_environment, warm
from stoker.cli.launch import parse
from stoker.launch.launchers.emit import emit

RANK = str(SCRIPTS / "rank.py")
LIGHT = ["--no-compat", "--oversubscribe", RANK, *HOSTILE]


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with Rig(2) as made:
        yield made


def command(kind: str, *words: str, **variables: str) -> list[str]:
    """What the training container runs, with $(NAME) replaced as Kubernetes does."""
    text = emit(parse(["--emit", kind, "--emit_image", "i", "--emit_name", "trial", *words, *LIGHT]))
    spec = list(yaml.safe_load_all(text))[-1]["spec"]
    if kind == "trainjob":
        found = spec["trainer"]["command"]
    elif kind == "kubernetes":
        found = spec["template"]["spec"]["containers"][0]["command"]
    else:
        replicas = (
            spec["pytorchReplicaSpecs"]["Worker"] if kind == "pytorchjob" else spec["mpiReplicaSpecs"]["Launcher"]
        )
        found = replicas["template"]["spec"]["containers"][0]["command"]
    expanded = [re.sub(r"\$\$|\$\((\w+)\)", lambda one: variables[one[1]] if one[1] else "$", word) for word in found]
    assert expanded[0] == "stoker"
    return [*STOKER, *expanded[1:]]


def run_pods(
    rig: Rig, commands: list[list[str]], variables: list[dict[str, str]], name: str = ""
) -> dict[int, dict[str, object]]:
    """Starts a command on each host; `name`, by which they find the first, becomes known to them when they have started."""
    started = [
        rig.start(host, words, env=environment(more))
        for host, words, more in zip(rig.hosts, commands, variables, strict=True)
    ]
    if name:
        time.sleep(2)
        rig.add_name(name, rig.hosts[0])
    try:
        ended = [process.communicate(timeout=90) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], ended
    return reports("".join(out for out, _ in ended))


def check(found: dict[int, dict[str, object]], address: str) -> None:
    assert [(found[rank]["host"], found[rank]["WORLD_SIZE"]) for rank in range(2)] == [("alpha", "2"), ("beta", "2")]
    assert {one["MASTER_ADDR"] for one in found.values()} == {address}
    assert all(one["argv"] == HOSTILE for one in found.values())


@pytest.mark.part("hosts")
@pytest.mark.root
@pytest.mark.netns
def test_pods_of_a_trainjob_find_each_other_before_dns_knows_the_first(rig: Rig) -> None:
    variables = [
        {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": str(number), "PET_MASTER_ADDR": "alpha.trial",
         "PET_MASTER_PORT": "29500"}
        for number in range(2)
    ]  # fmt: skip
    words = command("trainjob", "--num_machines", "2")
    check(run_pods(rig, [words, words], variables, name="alpha.trial"), "alpha.trial")


@pytest.mark.part("hosts")
@pytest.mark.root
@pytest.mark.netns
def test_pods_of_a_pytorchjob_have_no_numbers(rig: Rig) -> None:
    variables = {"PET_NNODES": "2:2", "PET_NPROC_PER_NODE": "1", "PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "alpha:23456",
                 "PET_MAX_RESTARTS": "1", "PYTHONUNBUFFERED": "1"}  # fmt: skip
    words = command("pytorchjob", "--num_machines", "2", "--max_restarts", "1")
    check(run_pods(rig, [words, words], [variables, variables]), "alpha")


@pytest.mark.part("hosts")
@pytest.mark.root
@pytest.mark.netns
def test_pods_of_a_job_are_numbered_by_their_index(rig: Rig) -> None:
    commands = [command("kubernetes", "--num_machines", "2", JOB_COMPLETION_INDEX=str(number)) for number in range(2)]
    rig.add_name("trial-0.trial", "alpha")
    check(run_pods(rig, commands, [{}, {}]), "trial-0.trial")


@pytest.mark.part("hosts")
@pytest.mark.root
@pytest.mark.netns
@pytest.mark.mpi
@pytest.mark.parametrize("name", MPIS)
def test_the_launcher_of_an_mpijob_starts_ranks_on_the_workers(rig: Rig, name: str) -> None:
    """Here a worker and the launcher are the same host."""
    slots = "{} slots=1\n" if name == "openmpi" else "{}:1\n"
    hostfile = rig.hostfile("".join(slots.format(host) for host in rig.hosts))
    words = command("mpijob", "--num_machines", "2", "--launcher", name)
    words = [word.replace("/etc/mpi/hostfile", hostfile) for word in words]
    done = rig.run("alpha", words, env=environment(mpi_environment(name)))
    found = reports(done.stdout)
    assert done.returncode == 0, done.stderr
    assert sorted(str(one["host"]) for one in found.values()) == ["alpha", "beta"]
    assert all(one["argv"] == HOSTILE for one in found.values())


def test_ranks_of_torchrun_in_a_pod_are_ranks() -> None:
    """torchrun reads the variables itself; they are still there for the `stoker launch` that each of its ranks is."""
    variables = {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "2", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "127.0.0.1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--no-python"]
    done = warm.run(
        [*torchrun, *STOKER, "launch", *LIGHT], env=environment({**variables, "PET_MASTER_PORT": "0"}), capture_output=True,
        text=True, timeout=120, check=False,
    )  # fmt: skip
    found = reports(done.stdout)
    assert sorted(found) == [0, 1], done.stderr
    assert {(one["WORLD_SIZE"], one["LOCAL_WORLD_SIZE"]) for one in found.values()} == {("2", "2")}
    assert all(one["argv"] == HOSTILE for one in found.values())
