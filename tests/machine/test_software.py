"""Launchers are recognised by their version output, and the current environment is read correctly."""

from __future__ import annotations

import os
import platform
import stat
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from stoker.machine import onednn, this_machine
from stoker.machine.launchers import find_launchers, recognise
from stoker.machine.software import read_software

INTEL = "Intel(R) MPI Library for Linux* OS, Version 2021.18 Build 20260215 (id: 1a2b3c)\nCopyright 2003-2026\n"
MPICH = (
    "HYDRA build details:\n    Version:                                 5.0.2\n    Release Date:   Mon Feb  2 2026\n"
)
OPEN_4 = "mpirun (Open MPI) 4.1.4\n\nReport bugs to http://www.open-mpi.org/community/help/\n"
OPEN_5 = "mpirun (Open MPI) 5.0.11rc1\n"


@pytest.mark.parametrize(
    ("answer", "kind", "version"),
    [
        (INTEL, "Intel MPI", "2021.18"),
        (MPICH, "MPICH", "5.0.2"),
        (OPEN_4, "Open MPI", "4.1.4"),
        (OPEN_5, "Open MPI", "5.0.11rc1"),
        ("slurm 23.02.1\n", "Slurm", "23.02.1"),
        ("slurm-wlm 22.05.8\n", "Slurm", "22.05.8"),
        ("something else 3.0\n", "unknown", None),
        ("", "unknown", None),
    ],
)
def test_launchers_are_recognised_by_their_version_output(answer: str, kind: str, version: str | None) -> None:
    assert recognise(answer) == (kind, version)


def _program(directory: Path, name: str, body: str) -> Path:
    file = directory / name
    file.write_text(f"#!/bin/sh\n{body}\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return file


def test_launchers_on_the_path_are_found_with_their_version(tmp_path: Path) -> None:
    mpirun = _program(tmp_path, "mpirun", "echo 'mpirun (Open MPI) 4.1.4'")
    (tmp_path / "mpiexec").symlink_to(mpirun)
    _program(tmp_path, "srun", "exit 7")
    found = {launcher.program: launcher for launcher in find_launchers(str(tmp_path))}
    assert (found["mpirun"].kind, found["mpirun"].version) == ("Open MPI", "4.1.4")
    assert "mpiexec" not in found  # the same program by another name
    assert found["srun"].kind == "unknown"


def test_a_launcher_outside_path_that_calls_its_neighbours_is_recognised(tmp_path: Path) -> None:
    _program(tmp_path, "mpirun", "mpiexec.hydra --version")
    _program(tmp_path, "mpiexec.hydra", f"cat <<'END'\n{INTEL}END")
    found = find_launchers(str(tmp_path))[0]
    assert (found.kind, found.version) == ("Intel MPI", "2021.18")


def test_a_launcher_that_hangs_does_not_delay_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.machine.launchers._SECONDS", 0.2)
    _program(tmp_path, "mpirun", "exec sleep 60")
    found = [launcher for launcher in find_launchers(str(tmp_path)) if launcher.program == "mpirun"]
    assert found[0].kind == "unknown"


def test_the_current_environment_is_read_correctly() -> None:
    import torch

    found = read_software()
    assert found.torch is not None
    assert found.torch.version == torch.__version__
    assert found.versions["numpy"] == metadata.version("numpy")
    assert "gloo" in found.torch.backends
    # scikit-learn, which other tests import, brings one of its own
    (openmp,) = [path for path in found.openmp if "scikit_learn" not in path]
    assert os.path.exists(openmp)


def test_onednn_names_the_kernel_of_bf16_products_and_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    kernel = onednn.bf16_kernel()
    assert capfd.readouterr().out == ""
    units = this_machine().isa.bf16_units
    if units and os.environ.get("ONEDNN_MAX_CPU_ISA") is None and platform.machine() == "x86_64":
        assert kernel is not None
        assert onednn.units_of(kernel) == units, "stoker.machine.isa and oneDNN disagree"


def test_the_kernel_is_the_last_one_in_onednns_log() -> None:
    lines = (
        "onednn_verbose,v1,info,cpu,isa:Intel AVX-512 with Intel DL Boost and bfloat16 support",
        "onednn_verbose,v1,primitive,exec,cpu,reorder,jit:uni,undef,src:f32,,64x64,0.1",
        "onednn_verbose,v1,primitive,exec,cpu,matmul,brg_matmul:avx10_1_512_amx,undef,src:bf16,,64x64:64x64,0.02",
    )
    assert onednn.implementation("\n".join(lines)) == "brg_matmul:avx10_1_512_amx"
    assert onednn.implementation("\n".join(lines[:2])) is None


def test_looking_at_versions_imports_nothing_but_torch() -> None:
    code = (
        "import sys\nfrom stoker.machine.software import read_software\nread_software()\n"
        "sys.exit('transformers' in sys.modules or 'accelerate' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
