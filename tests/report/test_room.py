"""The package `stoker.report` and the function `stoker.report(model)` share a name, and both work, in any order."""

from __future__ import annotations

import subprocess
import sys

import pytest

ORDERS = {
    "room first": "import stoker.report.log, stoker",
    "function first": "import stoker; stoker.report; import stoker.report.log",
    "trainer first": "from stoker import Trainer; import stoker",
}


@pytest.mark.parametrize("order", ORDERS)
def test_a_model_can_be_asked_for_its_report(order: str) -> None:
    program = f"{ORDERS[order]}\nimport torch\nprint(stoker.report(torch.nn.Linear(2, 2)))\nimport stoker.report.page"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-1500:]
    assert "Linear" in done.stdout
