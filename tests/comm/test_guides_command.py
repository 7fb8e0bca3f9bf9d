"""The guide's command for many machines, word for word, on two hosts of the rig: shared memory, oneCCL and a real mpirun."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from rig import GUIDES_MPIRUN, Rig, mpi_environment, oneccl_environment

SCRIPT = Path(__file__).parent.parent / "launch" / "scripts" / "qa_style.py"
STOKER = [sys.executable, "-c", "import sys; from stoker.cli import main; sys.exit(main(sys.argv[1:]))"]


@pytest.mark.part("launch")
@pytest.mark.mpi
@pytest.mark.netns
@pytest.mark.root
def test_mpirun_with_ccl_ipex_and_bf16_trains_on_two_hosts(tmp_path: Path) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "PMI", "MASTER_"))}
    environment = {**kept, **mpi_environment("impi"), **(oneccl_environment() or {}), "HF_HUB_OFFLINE": "1"}
    with Rig(2) as rig:
        words = [*GUIDES_MPIRUN, rig.hostfile(), *STOKER, "launch"]
        words += [str(SCRIPT), "--ddp_backend", "ccl", "--use_ipex", "--bf16", "--output_dir", str(tmp_path)]
        words += ["--report_to", "none", "--per_device_train_batch_size", "4", "--num_train_epochs", "1"]
        done = rig.run("alpha", [*words, "--ddp_timeout", "180"], env=environment, timeout=300)
        assert done.returncode == 0, done.stderr
        lines = [line.partition("REPORT ")[2] for line in done.stdout.splitlines()]
        found = [json.loads(line) for line in lines if line]
        assert len(found) == 4
        assert all(one["world"] == 4 and one["backend"] == "ccl" and one["bf16"] and one["steps"] for one in found)
        assert all("stoker" in one["origins"] and one["threads"] == 1 for one in found)
        assert "4 ranks on 2 hosts: shared memory within a host" in done.stderr
        assert not rig.leftovers()
