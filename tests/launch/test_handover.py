"""mpirun and srun never see the script's arguments: they reach the ranks unchanged, and start no other program."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from live import HOSTILE, SCRIPTS, launch, reports

from rig import MPIS, mpi_environment
from stoker.errors import UserError
from stoker.launch.rank import handover

RANK = str(SCRIPTS / "rank.py")
LONG = "x" * 120_000
"""Nearly the longest word that Linux takes on a command line."""


def second_program(folder: Path) -> list[str]:
    """Arguments in which Hydra and srun would see another program to start."""
    return [*HOSTILE, "a", ":", "-n", "1", "touch", str(folder / "started"), ":"]


@pytest.mark.part("launch")
@pytest.mark.mpi
@pytest.mark.parametrize("name", MPIS)
def test_arguments_with_a_colon_start_no_second_program(name: str, tmp_path: Path) -> None:
    arguments = second_program(tmp_path)
    words = ["--no-compat", "--oversubscribe", "--launcher", name, "-n", "2", "-genv", "OWN=own secret"]
    done = launch(*words, RANK, *arguments, LONG, LONG, env=mpi_environment(name))
    assert done.returncode == 0, done.stderr
    found = reports(done.stdout)
    assert [found[rank]["argv"] for rank in sorted(found)] == [[*arguments, "x120000", "x120000"]] * 2
    assert [found[rank]["OWN"] for rank in sorted(found)] == ["own secret"] * 2
    assert not list(tmp_path.iterdir())


@pytest.mark.part("launch")
@pytest.mark.mpi
def test_arguments_and_variables_are_not_visible_on_a_command_line(tmp_path: Path) -> None:
    """Every user of the machine may read command lines; the script looks at those of all processes that started it."""
    script = tmp_path / "look.py"
    script.write_text(
        "import os, pathlib\n"
        "pid, seen = os.getpid(), []\n"
        "while pid > 1:\n"
        "    seen.append(pathlib.Path(f'/proc/{pid}/cmdline').read_bytes().decode())\n"
        "    pid = int(pathlib.Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[1])\n"
        "    if 'from stoker.cli import main' in seen[-1]: break\n"
        "below = chr(0).join(seen[:-1])\n"
        "print('processes', len(seen), 'secret' in below, 'HANDOVER' in str(dict(os.environ)))\n"
    )
    words = ["--no-compat", "--launcher", "impi", "-n", "1", "-genv", "OWN=secret1", str(script), "--token", "secret2"]
    done = launch(*words, env=mpi_environment("impi"))
    assert done.returncode == 0, done.stderr
    _, count, secret, left = done.stdout.split()
    assert int(count) >= 3
    assert (secret, left) == ("False", "False")


# Like the real one: what follows a word `:` is another program, and only what --export names is passed on.
SRUN = """#!/usr/bin/env python3
import os, sys
words = sys.argv[1:]
if ":" in words:
    sys.exit("srun: another program")
exported = next(word for word in words if word.startswith("--export=")).partition("=")[2].split(",")
words = words[words.index("--kill-on-bad-exit=1") + 1 :]
kept = {name: os.environ[name] for name in os.environ if name in exported or "ALL" in exported or name == "PYTHONPATH"}
step = {"PROCID": "0", "STEP_NUM_TASKS": "1", "LOCALID": "0", "NODEID": "0", "STEP_TASKS_PER_NODE": "1", "STEP_ID": "0",
        "STEP_NODELIST": "localhost", "JOB_ID": "5"}
os.execve(words[0], words, kept | {f"SLURM_{name}": value for name, value in step.items()})
"""


@pytest.mark.parametrize("exported", [None, "NONE"])
def test_srun_starts_no_second_program_and_exports_what_the_rank_needs(exported: str | None, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "srun").write_text(SRUN)
    (tmp_path / "bin" / "srun").chmod(0o755)
    arguments = second_program(tmp_path)
    env = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "SLURM_JOB_ID": "5"}
    env |= {"SLURM_EXPORT_ENV": exported} if exported else {}
    done = launch("--launcher", "slurm", "-n", "1", "--no-compat", RANK, *arguments, env=env)
    assert done.returncode == 0, done.stderr
    assert reports(done.stdout)[0]["argv"] == arguments
    assert not (tmp_path / "started").exists()


def test_arguments_are_restored_exactly_and_the_variables_are_removed() -> None:
    words = ["{}", *HOSTILE, ":", "\udcff not UTF-8", LONG, LONG]
    environment = {"OWN": "1", "STOKER_HANDOVER_9": "of another launch", **handover.variables(words)}
    assert all(len(f"{name}={value}") < 128 << 10 for name, value in environment.items())
    assert all(
        value.replace("-", "").replace("_", "").rstrip("=").isalnum() for value in handover.variables(words).values()
    )
    assert handover.take(environment) == words
    assert environment == {"OWN": "1"}


def test_a_failed_handover_is_reported_in_one_sentence() -> None:
    with pytest.raises(UserError, match="arguments are too long"):
        handover.variables(["x" * 1_000_000])
    for environment in ({}, {"STOKER_HANDOVER": "1"}, {"STOKER_HANDOVER": "1", "STOKER_HANDOVER_0": "%%"}):
        with pytest.raises(UserError, match="did not pass the environment on"):
            handover.read(environment)


def test_a_script_whose_name_means_something_to_a_launcher_is_not_shown() -> None:
    assert handover.command("job", "dir/s.py")[-2:] == ["job", "dir/s.py"]
    for script in (":", "-n", "a:b", "$(x)", "a\nb"):
        assert handover.command("job", script)[-1] == "job"
