"""`stoker selftest` passes where the native library works, and fails with a sentence where it does not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_it_passes_on_this_machine() -> None:
    # in a process of its own: a package that another test imports may have loaded an OpenMP runtime, which it would report
    command = [sys.executable, "-m", "stoker", "selftest"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["ok"] * 3


def test_an_unsupported_instruction_set_fails_with_the_reason() -> None:
    environment = {**os.environ, "STOKER_ISA": "z80"}
    command = [sys.executable, "-m", "stoker", "selftest"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 1
    assert "z80" in done.stdout
    assert "Traceback" not in done.stderr


def test_a_file_that_is_not_a_library_fails_with_the_reason(tmp_path: Path) -> None:
    for level in ("baseline", "avx2", "avx512"):
        (tmp_path / f"libstoker-{level}.so").write_bytes(b"not a library")
    environment = {**os.environ, "STOKER_NATIVE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "stoker", "selftest"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 1
    assert "native library" in done.stdout
    assert "Traceback" not in done.stderr


def test_the_measured_clock_is_plausible() -> None:
    from stoker.kernels.clock import clock_ghz

    ghz = clock_ghz(1)
    assert ghz is None or 0.3 < ghz < 8.0
