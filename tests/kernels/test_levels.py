"""The tests of kernels and models hold on every lower instruction set that this CPU can be made to use, not only on its best."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stoker.kernels import microkernels, native

HERE = Path(__file__).parent
# test_stock_operators.py asks which operators tracers and exporters see: Python's side of things, a quarter of the time.
ONCE = ("test_levels.py", "test_sanitizer.py", "test_builds_agree.py", "test_emulate.py", "test_stock_operators.py")
FILES = sorted(
    str(file) for folder in (HERE, HERE.parent / "model") for file in folder.glob("test_*.py") if file.name not in ONCE
)

# What each kind of CPU looks like to Stoker, to torch's own kernels and to oneDNN. "avx512" is a CPU without bf16 units.
KINDS = {
    "avx512": {"STOKER_ISA": "avx512", "ATEN_CPU_CAPABILITY": "avx512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
    "avx2": {"STOKER_ISA": "avx2", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "baseline": {"STOKER_ISA": "baseline", "ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"},
}

# Tests whose subject is Python's side of things, or a process of its own: one instruction set is enough for them.
SAME_EVERYWHERE = (
    "compiled or compile or registration or dispatcher or checkpoint or python_threads or curve or page_faults or trainer "
    "or torch_save or oldest"
)


def lower_kinds() -> list[str]:
    """The kinds of CPU that this one can stand in for, without the kind that it is."""
    return [
        level for level in native.available() if level != native.available()[0] or microkernels.torch_has_bf16_units()
    ]


@pytest.mark.part("builds")
@pytest.mark.parametrize("kind", lower_kinds())
def test_lower_instruction_sets_pass_the_same_tests(kind):
    """In brief: a tenth of the random cases, five families; how torch calls the operators is the same for all levels."""
    environment = os.environ | KINDS[kind] | {"STOKER_TEST_BRIEF": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", *FILES]
    run = subprocess.run(
        [*command, "-k", f"not ({SAME_EVERYWHERE})"],
        cwd=HERE,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-1000:]
    assert " passed" in run.stdout


def test_stoker_isa_selects_the_library_that_is_loaded():
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
