"""`stoker env` prints what is missing in a shell, quoted, and nothing else."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from stoker.cli.env import exports, main


def test_nothing_is_exported_where_nothing_is_missing(tmp_path: Path) -> None:
    assert exports(tmp_path, {"PATH": f"/bin:{tmp_path}/bin"}) == {}


def test_intel_mpi_of_the_environment_is_found(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libmpi.so.12").touch()
    found = exports(tmp_path, {"PATH": "/bin", "LD_LIBRARY_PATH": "/old"})
    assert found["I_MPI_ROOT"] == str(tmp_path)
    assert found["LD_LIBRARY_PATH"] == f"{tmp_path}/lib:/old"
    assert found["PATH"] == f"{tmp_path}/bin:/bin"
    assert "I_MPI_ROOT" not in exports(tmp_path, {"PATH": "/bin", "I_MPI_ROOT": "/mine"})


def test_the_shell_understands_it(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/with space/bin")
    assert main([]) == 0
    script = capsys.readouterr().out + '\nprintf %s "$PATH"'
    shown = subprocess.run(["/bin/sh", "-c", script], capture_output=True, text=True, check=True).stdout
    assert shown.endswith(":/with space/bin")
