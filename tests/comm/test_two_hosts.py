"""Between hosts: four ranks on two hosts of the rig, whose interfaces have different names."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rig import Rig, oneccl_environment

pytestmark = [pytest.mark.part("hosts"), pytest.mark.root, pytest.mark.netns]
PROGRAM = str(Path(__file__).with_name("two_hosts.py"))


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with Rig(2) as made:
        yield made


def oneccl() -> dict[str, str]:
    found = oneccl_environment()
    if found is None:
        pytest.skip("oneCCL is not there: make mpis")
    return found


def start(rig: Rig, port: int, words: list[str], environment: dict[str, str]) -> list[subprocess.Popen[str]]:
    processes = []
    for rank in range(4):
        own = {
            "MASTER_ADDR": rig.address(rig.hosts[0]), "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "4",
            "OMP_NUM_THREADS": "1", **environment,
        }  # fmt: skip
        processes.append(rig.start(rig.hosts[rank // 2], [sys.executable, *words], env=own))
    return processes


@pytest.mark.parametrize("engine", ["shm", "oneccl", "auto"])
def test_four_ranks_on_two_hosts_agree(rig: Rig, engine: str) -> None:
    environment = {
        "STOKER_CCL_BACKEND": "compiled", "STOKER_CCL_ENGINE": engine, **({} if engine == "shm" else oneccl())
    }  # fmt: skip
    processes = start(rig, 29517, [PROGRAM], environment)
    outputs = ["".join(process.communicate(timeout=200)) for process in processes]
    for rank, (process, output) in enumerate(zip(processes, outputs, strict=True)):
        assert process.returncode == 0, output
        assert f"rank {rank} of 4 is done on {rig.hosts[rank // 2]}" in output
    transport = {"shm": "gloo between the leaders\n", "oneccl": "oneCCL between the leaders\n", "auto": ""}[engine]
    assert f"4 ranks on 2 hosts: shared memory within a host, {transport}" in outputs[0]
    assert "gloo between the leaders (" not in outputs[0]


def test_missing_ranks_are_named_with_their_host_on_all_hosts(rig: Rig) -> None:
    """By their number in the whole job, and not by the leader of their host."""
    processes = start(rig, 29520, [str(Path(PROGRAM).with_name("missing_ranks.py"))], {"STOKER_CCL_ENGINE": "shm"})
    outputs = [process.communicate(timeout=200) for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, outputs
    errors = [json.loads(output.splitlines()[-1]) for output, _ in outputs]
    for rank in (0, 1, 2):
        assert errors[rank]["behind a leader"].endswith("; no answer from rank 3 on beta"), (rank, errors)
    for rank in (2, 3):
        assert errors[rank]["of a sub-group"].endswith("; no answer from rank 1 on alpha"), (rank, errors)


def test_gloo_is_used_without_oneccl_and_one_line_says_so(rig: Rig) -> None:
    processes = start(rig, 29518, [PROGRAM, "briefly"], {"STOKER_CCL_ENGINE": "auto", "CCL_ROOT": "/nonexistent"})
    outputs = ["".join(process.communicate(timeout=200)) for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, outputs
    lines = [line for line in outputs[0].splitlines() if "stoker ccl:" in line]
    assert lines == [
        "stoker ccl: 4 ranks on 2 hosts: shared memory within a host, gloo between the leaders "
        "(oneCCL is not installed; `pip install stoker[ccl]` installs it)"
    ]
    processes = start(rig, 29519, [PROGRAM, "briefly"], {"STOKER_CCL_ENGINE": "oneccl", "CCL_ROOT": "/nonexistent"})
    outputs = ["".join(process.communicate(timeout=200)) for process in processes]
    assert all(process.returncode for process in processes)
    assert all("STOKER_CCL_ENGINE=oneccl: oneCCL is not installed" in output for output in outputs)
