"""The kernel tests hold on every instruction set this CPU has, not only on the best one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stoker.kernels import native

HERE = Path(__file__).parent
FILES = sorted(file.name for file in HERE.glob("test_*.py") if file.name not in ("test_levels.py", "test_sanitizer.py"))


@pytest.mark.slow
@pytest.mark.parametrize("level", native.available()[1:])
def test_other_levels_pass_the_same_tests(level):
    """With a tenth of the random cases; how torch calls the operators is the same for all levels."""
    environment = os.environ | {"STOKER_ISA": level, "STOKER_TEST_BRIEF": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *FILES]
    deselect = [
        "-k",
        "not compiled and not registration and not checkpoint and not python_threads and not other_levels",
    ]
    run = subprocess.run([*command, *deselect], cwd=HERE, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-1000:]
    assert " passed" in run.stdout


def test_the_level_asked_for_is_the_one_loaded():
    for level in native.available():
        code = "from stoker.kernels import native; import ctypes; f = native.library().stoker_isa; "
        code += "f.restype = ctypes.c_char_p; print(f().decode())"
        run = subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"STOKER_ISA": level},
            capture_output=True,
            text=True,
            check=True,
        )
        assert run.stdout.strip() == level


@pytest.mark.parametrize("level", ["sse9", *[name for name in native.LEVELS if name not in native.available()]])
def test_a_level_that_cannot_run_is_refused_with_the_reason(monkeypatch, level):
    monkeypatch.setenv("STOKER_ISA", level)
    with pytest.raises(native.NativeLibraryError, match=f"STOKER_ISA='{level}'"):
        native.level()


def test_every_level_was_built():
    """Also those this CPU cannot run."""
    directory = Path(native.library()._name).parent
    for level in native.LEVELS:
        assert (directory / f"libstoker-{level}.so").is_file()
