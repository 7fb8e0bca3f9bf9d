"""A rank is killed under `stoker launch --heal`: a new process takes its place, the other processes go on, and the run ends with
the weights of one that was not disturbed: bit by bit over ccl, which always adds in the order of ranks; within the error of fp32
sums over gloo, where the order depends on DDP's buckets."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from attack.case import chance_of, seed_of_tests
from launch.live import launch, running
from parts import rest_in
from stoker.distributed.roster import Entry
from stoker.hf.healing.healing import _healed_sentence

SCRIPT = str(Path(__file__).with_name("healing_script.py"))
TRAINING = ["--per_device_train_batch_size", "4", "--max_steps", "9", "--report_to", "none", "--learning_rate", "1e-3",
            "--disable_tqdm", "true", "--ddp_timeout", "120", "--logging_steps", "2", "--eval_strategy", "steps",
            "--eval_steps", "3", "--save_steps", "3"]  # fmt: skip


def train(
    folder: Path, ranks: int, *words: str, heal: bool = True, timeout: float = 400
) -> subprocess.CompletedProcess[str]:
    options = ["-n", str(ranks), "--oversubscribe", *["--heal"] * heal]
    return launch(*options, SCRIPT, "--output_dir", str(folder), *TRAINING, *words, timeout=timeout)


def weights(folder: Path, rank: int = 0) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = torch.load(folder / f"weights.{rank}.pt", weights_only=True)
    return found


def processes(folder: Path, rank: int) -> list[str]:
    return (folder / f"processes.{rank}").read_text().split()


def evaluations(folder: Path) -> dict[int, float]:
    """The loss of each evaluation by step; there is one entry for each, also if it was interrupted and repeated."""
    logged: list[dict[str, Any]] = json.loads((folder / "logged.json").read_text())
    found = [(one["step"], one["eval_loss"]) for one in logged if "eval_loss" in one]
    assert len(found) == len(dict(found))
    return dict(found)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """The folders of the same training when nobody is killed, by the number of ranks."""
    folders = {}
    for ranks in (2, 3):
        folders[ranks] = tmp_path_factory.mktemp(f"undisturbed{ranks}")
        done = train(folders[ranks], ranks, "--ddp_backend", "ccl", heal=False)
        assert done.returncode == 0, done.stderr[-3000:]
    return folders


def require_healed(
    done: subprocess.CompletedProcess[str], folder: Path, expected: Path, lost: list[int], error: float = 0.0
) -> None:
    """`lost` has the rank of each kill; `error` is the largest difference of a weight."""
    assert done.returncode == 0, done.stderr[-4000:]
    ranks = len(list(folder.glob("processes.*")))
    for rank in range(ranks):
        assert len(set(processes(folder, rank))) == 1 + lost.count(rank), "a process was started that was not needed"
        ours, theirs = weights(folder, rank), weights(expected)
        differences = [float((ours[name].double() - theirs[name].double()).abs().max()) for name in theirs]
        assert max(differences) <= error
        assert all(torch.equal(ours[name], weights(folder)[name]) for name in ours), "the ranks have different weights"
    assert evaluations(folder) == pytest.approx(evaluations(expected), abs=error)
    assert done.stderr.count("took its place") == len(lost)
    assert "restarted" not in done.stderr
    assert not running(["healing_script.py", str(folder)])


@pytest.mark.parametrize(
    ("ranks", "backend", "kill"),
    rest_in(
        "healing",
        [
            (2, "ccl", "1:forward:4"),
            (3, "gloo", "1:backward:4"),
            (3, "ccl", "0:optimizer:3"),
            (3, "ccl", "0:evaluate:3"),
            (2, "gloo", "0:save:6"),
        ],
    ),
)
def test_a_run_that_lost_a_rank_ends_as_if_nothing_had_happened(
    undisturbed: dict[int, Path], tmp_path: Path, ranks: int, backend: str, kill: str
) -> None:
    folder = tmp_path / "out"
    done = train(folder, ranks, "--ddp_backend", backend, "--kills", kill)
    error = 1e-5 if backend == "gloo" else 0.0
    require_healed(done, folder, undisturbed[ranks], [int(kill.partition(":")[0])], error)
    assert (folder / "checkpoint-9" / "stoker_manifest.json").exists()


@pytest.mark.part("healing")
def test_processes_start_with_everything_imported_also_the_second_time(
    undisturbed: dict[int, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    done = train(folder, 2, "--ddp_backend", "ccl", "--kills", "1:warm:2,1:warm:5")
    require_healed(done, folder, undisturbed[2], [1, 1])
    assert (folder / "warm.1").read_text().split() == ["False", "True", "True"]
    assert (folder / "warm.0").read_text().split() == ["False"]


@pytest.mark.part("healing")
@pytest.mark.parametrize("number", range(10))
def test_a_replacement_killed_at_any_moment_does_not_stall_the_run(
    undisturbed: dict[int, Path], tmp_path: Path, number: int
) -> None:
    """It heals, or it restarts from its checkpoint."""
    chance = chance_of(seed_of_tests(), "second kill", number)
    ranks, backend, rank = chance.choice((2, 3)), chance.choice(("ccl", "gloo")), chance.randrange(2)
    moment = chance.choice(("forward", "backward", "optimizer", "step_end"))
    kills = f"{rank}:{moment}:4,{rank}:milliseconds:{chance.randrange(2000)}"
    folder = tmp_path / "out"
    done = train(folder, ranks, "--ddp_backend", backend, "--kills", kills, "--ddp_timeout", "1800", timeout=240)
    story = [line for line in done.stderr.splitlines() if "was lost" in line or "is not replaced" in line]
    print(f"{ranks} ranks, {backend}, {kills}, {len(list(folder.glob('killed.*')))} kills:", *story, sep="\n  ")
    assert done.returncode == 0, done.stderr[-4000:]
    for one in range(ranks):
        ours, theirs = weights(folder, one), weights(undisturbed[ranks])
        assert all(torch.equal(ours[name], weights(folder)[name]) for name in ours), "the ranks have different weights"
        differences = [float((ours[name].double() - theirs[name].double()).abs().max()) for name in theirs]
        assert max(differences) <= (1e-5 if backend == "gloo" else 0.0)
    assert not running(["healing_script.py", str(folder)])


def test_the_log_says_how_many_ranks_were_lost_and_whether_a_step_is_repeated() -> None:
    lost = [Entry("a", 0, 1, signal=9), Entry("b", 2, 1, signal=11)]
    assert _healed_sentence(lost[:1], 8, 60, 2.04) == (
        "rank 0 (killed by signal 9) was lost after step 8; a new process took its place after 2.0 s, and step 9 is repeated"
    )
    assert _healed_sentence(lost, 60, 60, 2.0) == (
        "rank 0 (killed by signal 9) and rank 2 (killed by signal 11) were lost after step 60; "
        "new processes took their places after 2.0 s"
    )
