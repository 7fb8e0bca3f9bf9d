"""What tests may need beyond Python: a test marked with a need is skipped, with the reason, where it is not met.

STOKER_REQUIRE=root,netns,... turns those skips into failures: .ci/run sets it for all that it has installed.
"""

from __future__ import annotations

import functools
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stoker.machine import Machine

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


def _mpis() -> bool:
    from rig.mpis import MPIS, mpi_prefix

    return all(mpi_prefix(name) for name in MPIS)


NEEDS: dict[str, tuple[Callable[[], bool], str]] = {
    "data": (lambda: find_data() is not None, "no SQuAD and MRPC in ../shared/data beside the project"),
    "root": (lambda: os.geteuid() == 0, "needs root"),
    "netns": (_namespaces, "needs network namespaces (root, iproute2, util-linux)"),
    "mpi": (_mpis, "no MPIs in build/mpi: `make mpis` fetches them"),
    "browser": (lambda: _program("chromium", "chromium-browser", "google-chrome"), "no Chromium found"),
}


# Tests of many processes share /dev/shm, ports and network names: with several workers they all go to the same one.
TOGETHER = ("tests/comm/", "tests/distributed/", "tests/launch/", "tests/hf/test_two_ranks.py")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Any other file stays on one worker, so that what its fixtures made is made once."""
    from xdist.scheduler import LoadScopeScheduling

    class Files(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "processes" if nodeid.startswith(TOGETHER) else nodeid.partition("::")[0]

    return Files(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not item.nodeid.startswith(TOGETHER))  # the longest group first
    required = set(filter(None, os.environ.get("STOKER_REQUIRE", "").split(",")))
    for item in items:
        for need, (met, reason) in NEEDS.items():
            if item.get_closest_marker(need) and not met() and need not in required:
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_report_header() -> str:
    from attack.case import seed_of_today

    return f"attack: seed {seed_of_today()} ($STOKER_ATTACK_SEED, or the date)"


@pytest.fixture(scope="session")
def data() -> Path:
    """The directory with the real SQuAD and MRPC; for tests marked `data`."""
    found = find_data()
    assert found is not None, NEEDS["data"][1]
    return found


def _memory_directory() -> str | None:
    """Where thousands of small files cost nothing; None (the usual place) where that is missing or small."""
    try:
        return "/dev/shm" if shutil.disk_usage("/dev/shm").free > 1 << 30 and os.access("/dev/shm", os.W_OK) else None
    except OSError:
        return None


@pytest.fixture
def tree_path() -> Iterator[Path]:
    """A temporary directory for the /proc and /sys of a recorded machine, in memory: they are thousands of files."""
    with tempfile.TemporaryDirectory(prefix="stoker-tree-", dir=_memory_directory()) as directory:
        yield Path(directory)


@pytest.fixture(scope="session")
def recorded_root() -> Iterator[Callable[[str], Path]]:
    """Name of a recorded machine -> the root of its tree, laid out once per run; not to be written to."""
    from machine.recorded.layout import lay_out
    from machine.recorded.machines import MACHINES

    roots: dict[str, Path] = {}
    with tempfile.TemporaryDirectory(prefix="stoker-recorded-", dir=_memory_directory()) as directory:

        def root(name: str) -> Path:
            if name not in roots:
                roots[name] = lay_out(MACHINES[name](), Path(directory) / name)
            return roots[name]

        yield root


@pytest.fixture(scope="session")
def recorded(recorded_root: Callable[[str], Path]) -> Callable[[str], Machine]:
    """Name of a recorded machine -> the machine."""
    return lambda name: Machine.read(recorded_root(name))


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Tests neither read nor write what is kept in the home of the person who runs them."""
    os.environ.setdefault("STOKER_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(autouse=True)
def _leave_no_trace() -> Iterator[None]:
    """What a command that runs in this process sets for its whole process, a test must not leave to its neighbours."""
    environment = dict(os.environ)
    loggers = [logging.getLogger(name) for name in (None, "stoker", "transformers", "accelerate", "torch.distributed")]
    before = [(logger.level, logger.propagate, list(logger.handlers)) for logger in loggers]
    yield
    for logger, (level, propagate, handlers) in zip(loggers, before, strict=True):
        logger.level, logger.propagate, logger.handlers[:] = level, propagate, handlers
        logger.manager._clear_cache()  # type: ignore[attr-defined]
    if dict(os.environ) != environment:
        os.environ.clear()
        os.environ.update(environment)
