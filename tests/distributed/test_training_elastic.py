"""A worker is killed: the agent restarts the ranks from the last checkpoint; mpirun ends them and the command that continues is
printed."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from launch.live import STOKER, environment, launch
from rig import mpi_environment, warm

SCRIPT = str(Path(__file__).with_name("elastic_script.py"))
TRAINING = ["--per_device_train_batch_size", "4", "--max_steps", "9", "--save_steps", "3", "--report_to", "none",
            "--learning_rate", "1e-3", "--disable_tqdm", "true", "--ddp_timeout", "60"]  # fmt: skip


def result(folder: Path) -> float:
    return float((folder / "result.txt").read_text())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> float:
    """The result of the same training when nobody is killed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    done = launch("-n", "2", "--oversubscribe", SCRIPT, "--output_dir", str(folder), *TRAINING)
    assert done.returncode == 0, done.stderr[-3000:]
    return result(folder)


@pytest.mark.part("kills")
def test_ranks_restart_from_the_last_checkpoint_when_a_worker_is_killed(undisturbed: float, tmp_path: Path) -> None:
    cut = tmp_path / "cut"
    # A folder that was used before: its old checkpoints are not resumed from.
    (cut / "checkpoint-500").mkdir(parents=True)
    words = ["--output_dir", str(cut), "--kill_at", "7", *TRAINING]
    done = launch("-n", "2", "--oversubscribe", "--max_restarts", "1", SCRIPT, *words)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"restarted (1) after a failure; resuming from {cut / 'checkpoint-6'}" in done.stderr
    assert result(cut) == undisturbed


@pytest.mark.part("kills")
@pytest.mark.mpi
def test_under_mpirun_a_killed_worker_ends_the_job_and_the_printed_command_continues_it(
    undisturbed: float, tmp_path: Path
) -> None:
    cut = tmp_path / "cut"
    words = ["--output_dir", str(cut), "--kill_at", "7", *TRAINING]
    done = launch("-n", "2", "--launcher", "mpich", "--oversubscribe", SCRIPT, *words, env=mpi_environment("mpich"))
    assert done.returncode != 0
    lines = done.stderr.splitlines()
    at = next(i for i, line in enumerate(lines) if "to resume from the last checkpoint" in line)
    command = shlex.split(lines[at + 1])
    assert command[0] == "stoker"
    assert str(cut / "checkpoint-6") in command
    command = [word for word in command[1:] if word not in ("--kill_at", "7")]
    again = warm.run(
        [*STOKER, *command], env=environment(mpi_environment("mpich")), capture_output=True, text=True, timeout=120
    )
    assert again.returncode == 0, again.stderr[-3000:]
    assert result(cut) == undisturbed
