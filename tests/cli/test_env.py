"""`stoker env` prints what is missing in a shell, quoted, and nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
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
    assert "FI_PROVIDER_PATH" not in found
    (tmp_path / "lib" / "libtcp-fi.so").touch()
    assert exports(tmp_path, {"PATH": "/bin"})["FI_PROVIDER_PATH"] == f"{tmp_path}/lib"
    assert "I_MPI_ROOT" not in exports(tmp_path, {"PATH": "/bin", "I_MPI_ROOT": "/mine"})


def test_the_shell_understands_it(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/with space/bin")
    assert main([]) == 0
    script = capsys.readouterr().out + '\nprintf %s "$PATH"'
    shown = subprocess.run(["/bin/sh", "-c", script], capture_output=True, text=True, check=True).stdout
    assert shown.endswith(":/with space/bin")


def test_the_script_that_old_commands_source_sets_what_env_prints() -> None:
    """The line of oneccl_bindings_for_pytorch's manual, where its stand-in serves."""
    stand_in = "import sys; from stoker.hf.imports import install; install(lambda line: print(line, file=sys.stderr))"
    script = (
        f"path=$({sys.executable} -c '{stand_in}; from oneccl_bindings_for_pytorch import cwd; print(cwd)') && "
        'source "$path/env/setvars.sh" && printf "%s" "$PATH"'
    )
    environment = {**os.environ, "PATH": "/usr/bin:/bin", "VIRTUAL_ENV": str(Path(sys.executable).parent.parent)}
    bash = shutil.which("bash")
    assert bash is not None
    shown = subprocess.run([bash, "-euc", script], env=environment, capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stderr
    assert str(Path(sysconfig.get_paths()["data"]) / "bin") in shown.stdout.split(":")
    assert "it is discontinued" in shown.stderr


@pytest.mark.parametrize(("path", "words"), [("/bin", "finds stoker, mpirun"), (None, "nothing to set")])
def test_a_person_gets_an_explanation_that_the_shell_does_not_read(
    path: str | None, words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from stoker.cli import env

    monkeypatch.setattr(env, "exports", lambda prefix, environment: {} if path is None else {"PATH": path})
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main([]) == 0
    printed = capsys.readouterr()
    assert words in printed.err
    assert printed.out == ("" if path is None else "export PATH=/bin\n")
