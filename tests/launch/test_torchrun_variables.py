"""torchrun's PET_* variables fill what the command line leaves open, and take precedence over a config file."""

from __future__ import annotations

import pytest

from stoker.cli.launch import parse
from stoker.errors import UserError
from stoker.launch.config.config_file import Config, with_config
from stoker.launch.config.torchrun_variables import with_torchrun_variables
from stoker.launch.launch_plan import counts
from stoker.launch.options import Options
from stoker.launch.start import make_plan
from stoker.machine import Machine

POD = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "3", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "job-node-0-0.job",
       "PET_MASTER_PORT": "29500"}  # fmt: skip
ELASTIC = {"PET_NNODES": "1:4", "PET_NPROC_PER_NODE": "2", "PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "job-worker-0:23456",
           "PET_MAX_RESTARTS": "5"}  # fmt: skip


def options(environment: dict[str, str], *words: str) -> Options:
    return with_torchrun_variables(parse([*words, "s.py"]), environment)


def test_a_pod_of_a_trainjob() -> None:
    found = options(POD)
    assert (found.num_machines, found.per_machine, found.machine_rank) == (2, 3, 1)
    assert (found.main_process_ip, found.main_process_port) == ("job-node-0-0.job", 29500)
    assert counts(found) == (6, 3, 2)


def test_a_pod_of_an_elastic_pytorchjob_is_numbered_by_the_first() -> None:
    found = options(ELASTIC)
    assert (found.min_machines, found.num_machines, found.max_restarts) == (1, 4, 5)
    assert (found.main_process_ip, found.main_process_port, found.machine_rank) == ("job-worker-0", 23456, None)
    _, plan = make_plan(options({**ELASTIC, "PET_NNODES": "4:4"}, "--oversubscribe"), Machine.read(), {})
    assert (plan.machines, plan.min_machines, plan.machine_rank) == (4, 4, -1)


def test_the_rendezvous_has_precedence_over_the_address_of_the_first_machine() -> None:
    assert options({**POD, "PET_RDZV_ENDPOINT": "other:1"}).main_process_ip == "other"
    assert options({**POD, "PET_RDZV_ENDPOINT": ""}).main_process_ip == "job-node-0-0.job"


def test_the_command_line_has_precedence_and_a_config_file_has_not() -> None:
    found = options(POD, "-ppn", "1", "--machine_rank", "0", "--main_process_ip", "here")
    assert (found.per_machine, found.machine_rank, found.main_process_ip) == (1, 0, "here")
    assert counts(options(POD, "-n", "8")) == (8, 4, 2)
    assert options(ELASTIC, "--num_machines", "3").min_machines is None
    found = with_config(options(POD), Config(num_processes=16, num_machines=8, main_process_ip="file"))
    assert counts(found) == (6, 3, 2)
    assert found.main_process_ip == "job-node-0-0.job"


@pytest.mark.parametrize("text", ["auto", "cpu", "GPU"])
def test_a_number_of_processes_by_hardware_is_one_process(text: str) -> None:
    found = options({"PET_NPROC_PER_NODE": text})
    assert counts(found) == (1, 1, 1)
    assert "one process, which uses all cores" in found.notes[0]


def test_they_are_not_for_mpirun_and_slurm() -> None:
    for words in (["-f", "hosts"], ["--launcher", "slurm"], ["--launcher", "impi"]):
        assert options(POD, *words) == parse([*words, "s.py"])
    assert options({}) == parse(["s.py"])


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"PET_NNODES": "two"}, "PET_NNODES is set for torchrun, but 'two'"),
        ({"PET_NNODES": "4:2"}, "the larger number first"),
        ({"PET_NODE_RANK": "-1"}, "PET_NODE_RANK"),
        ({"PET_MASTER_PORT": "99999"}, "PET_MASTER_PORT"),
        ({"PET_NPROC_PER_NODE": "0"}, "PET_NPROC_PER_NODE"),
    ],
)
def test_what_is_no_number_is_one_sentence(variables: dict[str, str], says: str) -> None:
    with pytest.raises(UserError, match=says):
        options(variables)
