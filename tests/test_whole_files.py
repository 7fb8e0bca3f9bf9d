"""A file is whole or absent, and nothing is left beside it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stoker.hf.checkpointing.folders import tidy
from stoker.whole_files import write_text

# Writes into a file system of a few kilobytes: a limit of the process stands in for it.
FULL = """
import resource, signal, sys
from pathlib import Path
from stoker.whole_files import write_text
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
try:
    write_text(Path(sys.argv[1]), "x" * 100_000)
except OSError:
    sys.exit(5)
"""
KILLED = """
import os, sys
from pathlib import Path
from stoker import whole_files
os.replace = lambda *paths: os.kill(os.getpid(), 9)
whole_files.write_text(Path(sys.argv[1]), "new")
"""


def test_a_full_disk_leaves_the_old_file_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_text(path, "old")
    assert subprocess.run([sys.executable, "-c", FULL, str(path)], check=False).returncode == 5
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [("report.html", "old")]


@pytest.mark.parametrize("name", ["report.html", "all_results.json", "README.md"])
def test_temporary_files_of_a_killed_run_are_removed_by_the_next(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    write_text(path, "old")
    for kept in (".user.partial", "notes.json.partial"):
        (tmp_path / kept).touch()
    done = subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert path.read_text() == "old"
    assert f".{name}.partial" in os.listdir(tmp_path)
    tidy(tmp_path)
    assert sorted(os.listdir(tmp_path)) == sorted([name, ".user.partial", "notes.json.partial"])


def test_devices_and_pipes_are_written_in_place(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_text(pipe, "text")
        assert os.read(reader, 100) == b"text"
    finally:
        os.close(reader)
    assert pipe.is_fifo()
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]
