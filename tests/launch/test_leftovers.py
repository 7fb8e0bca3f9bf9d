"""After a launch, however it ended, neither processes nor directories of it are left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from live import STOKER, environment, running

from rig import MPIS, mpi_environment, warm
from stoker.launch.rank import leftovers

TWO = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")

# Each rank starts a child that leaves its session, as services do, and ignores that its parent has gone.
SCRIPT = """
import os, subprocess, sys, time
how, mark = sys.argv[1:]
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)", mark], start_new_session=True)
print("started", flush=True)
if how == "fail" and os.environ["RANK"] == "0":
    sys.exit(3)
time.sleep(0.1 if how == "end" else 100)
"""


def start(tmp_path: Path, how: str, mark: str, launcher: str = "torchrun") -> subprocess.Popen[str]:
    script, scratch = tmp_path / "script.py", tmp_path / "scratch"
    script.write_text(SCRIPT)
    scratch.mkdir(exist_ok=True)
    words = [*STOKER, "launch", "--launcher", launcher, "-n", "2", "--no-compat", str(script), how, mark]
    env = environment({"TMPDIR": str(scratch), **(mpi_environment(launcher) if launcher in MPIS else {})})
    return warm.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@TWO
@pytest.mark.parametrize(
    "launcher",
    ["torchrun", *(pytest.param(name, marks=[pytest.mark.part("launch"), pytest.mark.mpi]) for name in MPIS)],
)
def test_children_of_a_failed_rank_are_ended_and_its_directories_removed(launcher: str, tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    process = start(tmp_path, "fail", mark, launcher)
    printed = process.communicate(timeout=120)[1]
    assert process.returncode == 3, printed
    assert not running([mark])
    assert not list((tmp_path / "scratch").iterdir())


@TWO
def test_a_killed_launch_leaves_no_process_and_the_next_launch_removes_its_directory(tmp_path: Path) -> None:
    mark, other = uuid.uuid4().hex, uuid.uuid4().hex
    process = start(tmp_path, "hang", mark)
    assert process.stdout is not None
    for _ in range(2):
        assert "started" in process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    assert not running([mark], seconds=20)
    assert [path.name[:14] for path in (tmp_path / "scratch").iterdir()] == ["stoker-launch-"]
    process = start(tmp_path, "end", other)
    try:
        printed = process.communicate(timeout=120)[1]
        assert process.returncode == 0, printed
        assert not list((tmp_path / "scratch").iterdir())
        assert len(running([other], seconds=0)) == 2  # after a good end, what a script has left running stays
    finally:
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and other.encode() in _command(entry):
                os.kill(int(entry.name), signal.SIGKILL)


def _command(entry: Path) -> bytes:
    try:
        return (entry / "cmdline").read_bytes()
    except OSError:
        return b""


def test_directories_of_running_launches_and_other_users_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "stoker-launch-just-made").mkdir()
    (tmp_path / "stoker-launch-link").symlink_to(tmp_path)
    foreign = tmp_path / "stoker-launch-foreign"
    foreign.mkdir()
    (foreign / "file").touch()
    old = tmp_path / "stoker-launch-old"
    old.mkdir()
    for path in (foreign, old):
        os.utime(path, (time.time() - 7200,) * 2)
    with leftovers.directory("0" * 16) as mine:
        leftovers.remove_abandoned()
        assert mine.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "stoker-launch-foreign", "stoker-launch-just-made", "stoker-launch-link"
    ]  # fmt: skip


def test_processes_of_an_abandoned_launch_are_ended_with_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    job = uuid.uuid4().hex
    abandoned = tmp_path / "stoker-launch-x"
    abandoned.mkdir()
    (abandoned / "lock").write_text(job)
    stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(100)"
    process = warm.Popen(
        [sys.executable, "-c", stubborn], env={**os.environ, leftovers.JOB: job}, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    monkeypatch.setattr(leftovers, "GRACE", 0.1)
    leftovers.remove_abandoned()
    assert process.wait(timeout=30) == -signal.SIGKILL
    assert not abandoned.exists()
