"""Every build of the native library that this CPU runs gives the same results and stays inside its buffers.

`make emulate` runs the same cases on the AVX-512 build where the CPU has no AVX-512 (tests/kernels/emulate.py).
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import builds_agree
import numpy as np
import pytest

from stoker.kernels import native

HERE = Path(__file__).parent
LIBRARIES = Path(native.library()._name).parent


def test_all_builds_agree_on_every_exported_kernel() -> None:
    """In a process of its own: a kernel that leaves its buffers ends it."""
    command = [sys.executable, str(HERE / "builds_agree.py"), str(LIBRARIES), *native.available()[::-1]]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    assert run.stdout.splitlines()[-1] == f"{len(builds_agree.CASES)} cases x {len(native.available())} builds equal"


@pytest.mark.parametrize(
    ("rows", "code"), [(3, 0), (4, -signal.SIGSEGV)], ids=["as many rows as there are", "one row more"]
)
def test_an_access_beyond_a_buffer_is_a_fault(rows: int, code: int) -> None:
    program = (
        f"from native_calls import Native; import numpy as np; native = Native({native.library()._name!r})\n"
        "x, y = native.place(np.ones((3, 5), np.float32)), native.empty((3, 5), np.float32)\n"
        f"native.call('dropout', x=x, y=y, rows={rows}, columns=5, p=0.0, key=1, dtype=0, threads=1)\n"
        "native.check_and_release()"
    )
    run = subprocess.run([sys.executable, "-c", program], cwd=HERE, capture_output=True, text=True, check=False)
    assert run.returncode == code, run.stderr


def test_a_write_before_a_buffer_is_reported() -> None:
    build = builds_agree.Native(native.library()._name)
    x = build.place(np.ones(7, np.float32))
    y = build.empty(7, np.float32)
    arguments = {"x": x, "rows": 1, "columns": 7, "p": 0.0, "key": 1, "dtype": 0, "threads": 1}
    build.call("dropout", y=y, **arguments)
    build.call("dropout", y=y.ctypes.data - 4, **arguments)
    with pytest.raises(AssertionError, match="before the start of a buffer"):
        build.check_and_release()


def test_an_exported_function_without_a_case_is_reported() -> None:
    described = set(native.header().functions)
    assert builds_agree.without_case(LIBRARIES, described) == set()
    assert builds_agree.without_case(LIBRARIES, described - {"stoker_dropout"}) == {"stoker_dropout"}


@pytest.mark.parametrize(
    ("found", "exact", "differs"),
    [
        ([1.0, 2.0, 3.0], True, False),
        ([1.0, 2.0, 3.000001], True, True),
        ([1.0, 2.0, 3.000001], False, False),
        ([1.0, 2.0, 3.001], False, True),
        ([1.0, 2.0, np.nan], False, True),
        ([1.0, 2.0, np.inf], False, True),
    ],
)
def test_results_that_differ_by_more_than_rounding_are_reported(found: list[float], exact: bool, differs: bool) -> None:
    expected = np.array([1.0, 2.0, 3.0], np.float32)
    assert bool(builds_agree.difference(np.array(found, np.float32), expected, exact)) == differs
