"""Between hosts: four ranks on two hosts of the rig, whose interfaces need not be named alike."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rig import Rig

PROGRAM = str(Path(__file__).with_name("two_hosts.py"))


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with Rig(2) as made:
        yield made


@pytest.mark.root
@pytest.mark.netns
@pytest.mark.parametrize("backend", ["auto", "python"])
def test_four_ranks_on_two_hosts_agree(rig: Rig, backend: str) -> None:
    processes = []
    for rank in range(4):
        host = rig.hosts[rank // 2]
        environment = {
            "MASTER_ADDR": rig.address(rig.hosts[0]), "MASTER_PORT": "29517", "RANK": str(rank), "WORLD_SIZE": "4",
            "OMP_NUM_THREADS": "1", "STOKER_CCL_BACKEND": backend,
        }  # fmt: skip
        processes.append(rig.start(host, [sys.executable, PROGRAM], env=rig.environment(environment)))
    outputs = ["".join(process.communicate(timeout=200)) for process in processes]
    for rank, (process, output) in enumerate(zip(processes, outputs, strict=True)):
        assert process.returncode == 0, output
        assert f"rank {rank} of 4 is content on {rig.hosts[rank // 2]}" in output
    assert "4 ranks on 2 hosts: shared memory within a host, gloo between the leaders" in outputs[0]
