"""An unmodified masked-LM script that is killed and started again under `stoker launch` ends with the same weights."""

from __future__ import annotations

import re
from pathlib import Path

from live import SCRIPTS, launch


def run(folder: Path, kill_at: str = "") -> tuple[int, str]:
    folder.mkdir(parents=True, exist_ok=True)
    done = launch(
        str(SCRIPTS / "mlm_style.py"), "--output_dir", str(folder / "out"), "--report_to", "none", "--save_steps", "4",
        "--per_device_train_batch_size", "4", "--num_train_epochs", "1", "--learning_rate", "1e-3",
        env={"HF_HUB_OFFLINE": "1", "KILL_AT": kill_at},
    )  # fmt: skip
    found = re.search("WEIGHTS (.*)", done.stdout)
    return done.returncode, found[1] if found else done.stderr[-2000:]


def test_the_masks_of_an_unmodified_script_are_drawn_again(tmp_path: Path) -> None:
    code, undisturbed = run(tmp_path / "undisturbed")
    assert code == 0, undisturbed
    code, _ = run(tmp_path / "killed", kill_at="6")
    assert code != 0
    assert (tmp_path / "killed" / "out" / "checkpoint-4").is_dir()
    assert run(tmp_path / "killed") == (0, undisturbed)
