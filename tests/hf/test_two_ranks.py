"""Two processes train one model: a signal to one of them stops both after the same step, and the run resumes exactly."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

from hf.test_damaged_checkpoints import flip
from hf.test_folder_lock import Holder
from rig import warm
from stoker.hf.checkpointing import manifest

HERE = Path(__file__).parent


def launch(folder: Path, *words: str) -> list[tuple[int, str]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank in range(2):
        environment = {
            **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        ranks.append(
            warm.Popen(
                [sys.executable, str(HERE / "two_ranks.py"), str(folder), *words],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                transformers=True,
            )
        )
    try:
        return [(rank.returncode, out) for rank in ranks for out in [rank.communicate(timeout=400)[0]]]
    finally:
        for rank in ranks:
            rank.kill()


def result(ends: list[tuple[int, str]]) -> str:
    assert [code for code, _ in ends] == [0, 0], "\n".join(out[-2500:] for _, out in ends)
    found = re.search(r"RESULT (.*)", ends[0][1])
    assert found is not None
    return found[1]


def test_a_signal_to_one_rank_stops_both_and_the_run_resumes_exactly(tree_path: Path) -> None:
    whole = result(launch(tree_path / "whole"))
    stopped = launch(tree_path / "cut", "5")
    assert [code for code, _ in stopped] == [143, 143], "\n".join(out[-2500:] for _, out in stopped)
    assert "Stopped by SIGTERM after step 6" in stopped[0][1]
    assert "To resume (start 2 processes as before):" in stopped[0][1]
    files = {path.name for path in (tree_path / "cut" / "checkpoint-6").iterdir()}
    assert {"rng_state_0.pth", "rng_state_1.pth", "model.safetensors"} <= files
    sealed = json.loads((tree_path / "cut" / "checkpoint-6" / manifest.NAME).read_text())["files"]
    assert files == {*sealed, manifest.NAME}  # written when the files of all ranks were there
    shutil.copytree(tree_path / "cut", tree_path / "damaged")
    assert result(launch(tree_path / "cut")) == whole
    # What only rank 0 notices, all ranks must heed: they go on from the same older checkpoint.
    flip(tree_path / "damaged" / "checkpoint-6" / "rng_state_1.pth")
    resumed = launch(tree_path / "damaged")
    assert result(resumed) == whole
    assert "checkpoint-6 is skipped because it cannot be resumed from: rng_state_1.pth does not match" in resumed[0][1]
    assert "is skipped" not in resumed[1][1]


def test_all_ranks_of_a_second_run_in_the_same_folder_are_refused(tree_path: Path) -> None:
    holder = Holder(tree_path)
    try:
        for code, out in launch(tree_path):
            assert code == 1
            assert f"UserError: another run is training in {tree_path}" in out
    finally:
        holder.kill()
