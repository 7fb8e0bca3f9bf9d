"""Which tests run, in which order, and what they share.

A test marked with a need (rig/needs.py) is skipped, with the reason, where it is not met. STOKER_REQUIRE=root,netns,... turns
those skips into failures: .ci/run sets it for all that it has installed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))  # tests share code as `machine.recorded`, `rig`, ...

import durations
from attack.case import seed_of_tests
from parts import PARTS
from rig.needs import NEEDS, find_data, unmet
from stoker.machine import Machine, rates, this_machine

# Which part of `make test-all` a test belongs to is its marker `part`; a test without one is run by `make test`.
EVERY_COMMIT = "every-commit"
BARE = {"data", "root", "mounts"}  # needs that may be met on a machine on which nothing was installed for the tests
# Files that take fewer seconds come last, in random order if the tests are shuffled. The others come first, the longest in front.
SHORT = 3.0


def pytest_addoption(parser: pytest.Parser) -> None:
    about = "run files, and the tests within each file, in a random order; the number printed at the top repeats it"
    parser.addoption("--shuffle", nargs="?", const="", metavar="SEED", help=about)
    about = (
        f"only the tests of one part of `make test-all`, or with {EVERY_COMMIT!r} those of `make test`; without it, all"
    )
    parser.addoption("--part", choices=(EVERY_COMMIT, *PARTS), help=about)
    parser.addoption("--store-durations", action="store_true", help="write what the tests took to tests/durations.json")


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        config.option.shuffle = config.workerinput["shuffle"]  # all of xdist's workers must agree on the order
    elif config.option.shuffle == "":
        config.option.shuffle = str(random.SystemRandom().randrange(10**6))
    if config.option.store_durations and not hasattr(config, "workerinput"):
        config.pluginmanager.register(durations.Recorder(), "stored durations")


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["shuffle"] = node.config.option.shuffle


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file stays on one worker, so that what its fixtures made is made once."""
    from xdist.scheduler import LoadFileScheduling

    return LoadFileScheduling(config, log)


@pytest.hookimpl(tryfirst=True)  # pytest's own hook then puts those together that share a fixture
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.part:
        chosen = [item for item in items if part_of(item) == config.option.part]
        config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
        items[:] = chosen
    if config.option.shuffle is not None:
        shuffle(items, config.option.shuffle)
    taken = durations.of_files(item.nodeid for item in items)
    items.sort(key=lambda item: -time if (time := taken[file_of(item)]) >= SHORT else 0.0)
    required = set(filter(None, os.environ.get("STOKER_REQUIRE", "").split(",")))
    for item in items:
        for need in needs_of(item):
            if need not in required and (reason := unmet(need)):
                item.add_marker(pytest.mark.skip(reason=reason))


def needs_of(item: pytest.Item) -> list[str]:
    return [need for need in NEEDS if item.get_closest_marker(need)]


def part_of(item: pytest.Item) -> str:
    marker = item.get_closest_marker("part")
    name = marker.args[0] if marker else EVERY_COMMIT
    if name != EVERY_COMMIT and name not in PARTS:
        raise pytest.UsageError(f"{item.nodeid}: tests/parts.py has no part {name!r}")
    needs = BARE if name == EVERY_COMMIT else {*BARE, *PARTS[name].needs}
    for need in needs_of(item):
        if need not in needs:  # it would always be skipped
            raise pytest.UsageError(f"{item.nodeid} needs {need}: a part of tests/parts.py that has it, not {name}")
    return str(name)


def file_of(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def shuffle(items: list[pytest.Item], seed: str) -> None:
    """The files in a random order, and the tests within each."""
    places = {item: (_draw(seed, file_of(item)), _draw(seed, item.nodeid)) for item in items}
    items.sort(key=places.__getitem__)


def _draw(seed: str, name: str) -> float:
    return random.Random(f"{seed} {name}").random()  # of each name by itself: a part of the tests keeps its order


def pytest_report_header(config: pytest.Config) -> list[str]:
    seed = config.option.shuffle
    order = "as written (--shuffle for a random one)" if seed is None else f"shuffled; --shuffle {seed} repeats it"
    return [f"order: {order}", f"attack: seed {seed_of_tests()} ($STOKER_ATTACK_SEED)"]


@pytest.fixture(scope="session")
def data() -> Path:
    """The directory with the real SQuAD and MRPC; for tests marked `data`."""
    found = find_data()
    assert found is not None, unmet("data")
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
    if "STOKER_CACHE_DIR" not in os.environ:
        os.environ["STOKER_CACHE_DIR"] = str(folder)
        _store_rates()


def _store_rates() -> None:
    """Invented rates, so that no training in a test measures them. Tests of the measurement have a cache of their own."""
    machine = this_machine()
    stored = rates.Rates(
        threads=machine.usable_threads, fp32_one=500.0, fp32_all=1000.0, bf16_one=20.0, bf16_all=40.0, bandwidth_one=10.0,
        bandwidth_all=20.0, clock_one=None, clock_all=None, torch=rates.installed_version("torch"),
        measured="2026-01-01T00:00:00Z", seconds=6.0, disturbed=False,
    )  # fmt: skip
    assert rates.save(machine, stored) is None


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
