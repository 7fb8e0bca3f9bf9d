"""The native code reads and writes only what it may, and does nothing undefined."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kernels import sanitize


@pytest.mark.part("builds")
def test_no_fault_under_the_sanitizers():
    """The quick run; `make sanitize` is the full one."""
    if reason := sanitize.missing():
        pytest.skip(reason)
    run = subprocess.run([sys.executable, sanitize.__file__, "--quick"], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
