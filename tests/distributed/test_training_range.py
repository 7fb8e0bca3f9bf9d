"""One of two hosts dies during training: the other continues from the last checkpoint with the same batches."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from distributed.test_training_elastic import SCRIPT
from launch.live import STOKER, environment
from rig import Rig

TRAINING = ["--per_device_train_batch_size", "4", "--max_steps", "8", "--save_steps", "3", "--report_to", "none",
            "--learning_rate", "1e-3", "--disable_tqdm", "true", "--dropout", "0"]  # fmt: skip


@pytest.mark.part("hosts")
@pytest.mark.root
@pytest.mark.netns
def test_training_continues_on_one_host_when_the_other_dies(tmp_path: Path) -> None:
    with Rig(2) as rig:
        launch = ["launch", "--nnodes", "1:2", "-ppn", "1", "--oversubscribe"]
        where = ["--rdzv_endpoint", f"{rig.address('alpha')}:29500"]
        script = [SCRIPT, "--output_dir", str(tmp_path), "--wait_at", "7", *TRAINING]
        env = environment({"STOKER_LAUNCH_SILENCE": "3", "OMP_NUM_THREADS": "1"})
        both = [rig.start(host, [*STOKER, *launch, *where, *script], env=env) for host in rig.hosts]
        end = time.monotonic() + 300
        while not (tmp_path / "waiting").exists() and time.monotonic() < end and both[0].poll() is None:
            time.sleep(0.05)
        rig.kill("beta")
        errors = both[0].communicate(timeout=300)[1]
        both[1].communicate()
        assert both[0].returncode == 0, errors[-3000:]
        assert "(beta) is gone; continuing with 1 of 2 machines" in errors
        assert f"restarted because machines joined or left; resuming from {tmp_path / 'checkpoint-6'}" in errors
        assert "gradient accumulation was 1, is 2; processes was 2, is 1" in errors
        last = json.loads((tmp_path / "checkpoint-8" / "stoker_run.json").read_text())["run"]
        assert (last["processes"], last["gradient accumulation"]) == (1, 2)
        # What one process gets that was never disturbed, with two batches of 4 per step.
        assert abs(float((tmp_path / "result.txt").read_text()) - 157.1893718) < 1e-4
        assert not rig.leftovers()
