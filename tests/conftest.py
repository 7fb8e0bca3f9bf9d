"""What tests may need beyond Python: a test marked with a need is skipped, with the reason, where it is not met.

STOKER_REQUIRE=root,netns,... turns those skips into failures: .ci/run sets it for all that it has installed.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(Path(__file__).resolve().parent))  # tests share code as `machine.recorded`, `rig`, ...


@functools.cache
def find_data() -> Path | None:
    """The real data beside the project, or beside any directory above it (a worktree lies deeper)."""
    for directory in ROOT.parents:
        found = directory / "shared" / "data"
        if (found / "squad").is_dir() and (found / "mrpc").is_dir():
            return found
    return None


@functools.cache
def _namespaces() -> bool:
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        return False
    return subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False).returncode == 0


def _program(*names: str) -> bool:
    """On PATH, or beside this Python."""
    places = os.pathsep.join((os.environ.get("PATH", ""), os.path.dirname(sys.executable)))
    return any(shutil.which(name, path=places) for name in names)


NEEDS: dict[str, tuple[Callable[[], bool], str]] = {
    "data": (lambda: find_data() is not None, "no SQuAD and MRPC in ../shared/data beside the project"),
    "root": (lambda: os.geteuid() == 0, "needs root"),
    "netns": (_namespaces, "needs network namespaces (root, iproute2, util-linux)"),
    "mpi": (lambda: _program("mpirun", "mpiexec"), "no mpirun found"),
    "browser": (lambda: _program("chromium", "chromium-browser", "google-chrome"), "no Chromium found"),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    required = set(filter(None, os.environ.get("STOKER_REQUIRE", "").split(",")))
    for item in items:
        for need, (met, reason) in NEEDS.items():
            if item.get_closest_marker(need) and not met() and need not in required:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def data() -> Path:
    """The directory with the real SQuAD and MRPC; for tests marked `data`."""
    found = find_data()
    assert found is not None, NEEDS["data"][1]
    return found


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Tests neither read nor write what is kept in the home of the person who runs them."""
    os.environ.setdefault("STOKER_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
