"""After a restart, a run resumes from its own last checkpoint, whatever an earlier run left in the folder."""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path

from stoker.hf.checkpointing.restart import newest_of_this_run
from stoker.run_report.log import NAME


def checkpoint(folder: Path, step: int, time: float) -> Path:
    path = folder / f"checkpoint-{step}"
    path.mkdir()
    (path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    for name in ("optimizer.pt", "scheduler.pt"):
        with zipfile.ZipFile(path / name, "w") as archive:
            archive.writestr("data", b"0")
    (path / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    os.utime(path / "trainer_state.json", (time, time))
    return path


def test_an_older_runs_checkpoint_with_more_steps_does_not_hide_this_runs(tree_path: Path) -> None:
    (tree_path / NAME).write_text(json.dumps({"kind": "start", "time": 5000.0}) + "\n")
    checkpoint(tree_path, 1000, time=100.0)
    assert newest_of_this_run(tree_path) is None
    checkpoint(tree_path, 50, time=5010.0)
    mine = checkpoint(tree_path, 100, time=5020.0)
    assert newest_of_this_run(tree_path) == mine
    (mine / "optimizer.pt").write_bytes(b"")
    assert newest_of_this_run(tree_path) == tree_path / "checkpoint-50"
