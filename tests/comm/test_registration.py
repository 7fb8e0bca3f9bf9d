""" "ccl" is a backend in every script of the environment, which imports nothing of Stoker until a group is made with it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import stoker

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys
import torch
print(sorted(name for name in sys.modules if name.startswith("stoker")))
import torch.distributed as dist
print("ccl" in dist.Backend.backend_list, [name for name in sys.modules if name.startswith("stoker.")])
dist.init_process_group("ccl", store=dist.HashStore(), rank=0, world_size=1)
ones = torch.ones(3)
dist.all_reduce(ones)
print(ones.tolist(), "stoker.comm.process_group" in sys.modules)
dist.destroy_process_group()
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """In which Stoker is installed with the entry points of this source tree, whatever another installation has."""
    declared = re.search(r'^\[project\.entry-points\."torch\.backends"\]\n(.*?)\n\n', (ROOT / "pyproject.toml").read_text(),
                         re.M | re.S)  # fmt: skip
    assert declared is not None
    lines = re.sub(r'"([^"]*)".*', r"\1", declared[1])
    folder = tmp_path / "stoker-0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: stoker\nVersion: 0\n")
    (folder / "entry_points.txt").write_text(f"[torch.backends]\n{lines}\n")
    path = os.pathsep.join([str(tmp_path), str(Path(stoker.__file__).parents[1])])
    return {**os.environ, "PYTHONPATH": path, "TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}


def test_import_torch_imports_one_small_module_until_ccl_is_used(environment: dict[str, str]) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["['stoker_ccl']", "True []", "[1.0, 1.0, 1.0] True"]
