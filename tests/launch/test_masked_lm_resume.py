"""An unmodified masked-LM script that is killed and started again under `stoker launch` ends with the same weights."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from live import SCRIPTS, launch


def run(folder: Path, kill_at: str = "") -> tuple[int, str]:
    """Its exit code, and a hash of the weights at its end."""
    folder.mkdir(parents=True, exist_ok=True)
    done = launch(
        str(SCRIPTS / "mlm_style.py"), "--output_dir", str(folder / "out"), "--report_to", "none", "--save_steps", "4",
        "--logging_steps", "4",
        "--per_device_train_batch_size", "4", "--num_train_epochs", "1", "--learning_rate", "1e-3",
        env={"HF_HUB_OFFLINE": "1", "KILL_AT": kill_at},
    )  # fmt: skip
    found = re.search("WEIGHTS (.*)", done.stdout)
    if log := re.search("LOG (.*)", done.stdout):
        entries = [entry for entry in json.loads(log[1]) if "loss" in entry]
        assert all(entry["tokens_per_second"] > 0 and entry["padding_avoided"] > 0 for entry in entries), entries
    return done.returncode, found[1] if found else done.stderr[-2000:]


@pytest.mark.part("launch")
def test_the_masks_of_an_unmodified_script_are_drawn_again(tmp_path: Path) -> None:
    code, undisturbed = run(tmp_path / "undisturbed")
    assert code == 0, undisturbed
    code, _ = run(tmp_path / "killed", kill_at="6")
    assert code != 0
    assert (tmp_path / "killed" / "out" / "checkpoint-4").is_dir()
    assert run(tmp_path / "killed") == (0, undisturbed)
