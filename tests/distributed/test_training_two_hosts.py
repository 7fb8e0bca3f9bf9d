"""Four processes on two hosts end with the weights of one process, over gloo and over ccl."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest

from rig import Rig, warm

PROGRAM = str(Path(__file__).with_name("two_hosts_training.py"))


@pytest.mark.part("hosts")
@pytest.mark.root
@pytest.mark.netns
def test_four_processes_on_two_hosts_give_the_weights_of_one(tmp_path: Path) -> None:
    alone = {**os.environ, "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29541"}
    warm.run([sys.executable, PROGRAM, str(tmp_path), "gloo"], env=alone, check=True, timeout=120)
    expected = np.load(tmp_path / "weights1.npy")
    with Rig(2) as rig:
        for number, backend in enumerate(("ccl", "gloo")):
            processes = []
            for rank in range(4):
                environment = {
                    "MASTER_ADDR": rig.address(rig.hosts[0]), "MASTER_PORT": str(29542 + number), "RANK": str(rank),
                    "WORLD_SIZE": "4", "LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1",
                    "GLOO_SOCKET_IFNAME": "eth0",
                }  # fmt: skip
                words = [sys.executable, PROGRAM, str(tmp_path), backend]
                processes.append(rig.start(rig.hosts[rank // 2], words, env=rig.environment(environment)))
            outputs = ["".join(process.communicate(timeout=170)) for process in processes]
            for rank, (process, output) in enumerate(zip(processes, outputs, strict=True)):
                assert process.returncode == 0, output[-3000:]
                assert f"rank {rank} of 4 has trained" in output
            weights = np.load(tmp_path / "weights4.npy")
            assert 0 < np.abs(weights - expected).max() < 2e-6, backend
            (tmp_path / "weights4.npy").unlink()
