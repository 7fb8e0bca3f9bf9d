"""Faults between hosts: if a process dies or a link is cut, the others raise within the timeout and name the host; a short
interruption only delays the job, and the sums are right. Over gloo and over oneCCL."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rig import Rig, oneccl_environment

pytestmark = [pytest.mark.part("hosts"), pytest.mark.root, pytest.mark.netns]
PROGRAM = str(Path(__file__).with_name("network_faults.py"))
Start = Callable[..., list[subprocess.Popen[str]]]


@pytest.fixture
def rig() -> Iterator[Rig]:
    with Rig(2) as made:
        yield made


@pytest.fixture
def engine() -> str:
    """Slow faults are tested over oneCCL only; gloo and oneCCL are called in the same place."""
    return "oneccl"


@pytest.fixture
def start(engine: str, rig: Rig, tmp_path: Path) -> Start:
    extra = {} if engine == "shm" else oneccl_environment()
    if extra is None:
        pytest.skip("oneCCL is not there: make mpis")

    def begin(timeout: float, count: int = 400_000) -> list[subprocess.Popen[str]]:
        base = {"MASTER_ADDR": rig.address("alpha"), "MASTER_PORT": "29531", "WORLD_SIZE": "4", "OMP_NUM_THREADS": "1"}
        base |= {"STOKER_CCL_ENGINE": engine, **extra}
        words = [sys.executable, PROGRAM, str(timeout), str(count), str(tmp_path / "stop")]
        ranks = [rig.start(rig.hosts[rank // 2], words, env={**base, "RANK": str(rank)}) for rank in range(4)]
        for one in ranks:
            assert one.stdout is not None
            while (line := one.stdout.readline()) != "READY\n":
                assert line, one.stderr.read() if one.stderr else ""
        time.sleep(0.5)
        return ranks

    return begin


def outcomes(ranks: list[subprocess.Popen[str]], timeout: float = 60) -> list[str]:
    return [one.communicate(timeout=timeout)[0].strip() for one in ranks]


def assert_failed(texts: list[str], within: float) -> None:
    for text in texts:
        found = re.search(r"FAILED after ([\d.]+) s: (.*)", text)
        assert found, texts
        assert float(found[1]) < within, text
    assert any(
        re.search(r"communication with another host failed \(rank (0 on alpha|2 on beta)\)|has died", text)
        for text in texts
    ), texts


@pytest.mark.parametrize("engine", ["shm", "oneccl"])
def test_a_killed_leader_fails_all_ranks_of_all_hosts(start: Start, rig: Rig) -> None:
    ranks = start(timeout=8)
    ranks[2].kill()
    assert_failed(outcomes([ranks[0], ranks[1], ranks[3]]), within=30)
    assert not rig.leftovers()


def test_a_host_that_loses_power_fails_the_others(start: Start, rig: Rig) -> None:
    ranks = start(timeout=5)
    rig.kill("beta")
    assert_failed(outcomes(ranks[:2]), within=25)
    outcomes(ranks[2:])


@pytest.mark.parametrize("engine", ["shm", "oneccl"])
def test_a_cut_link_fails_both_sides(start: Start, rig: Rig) -> None:
    ranks = start(timeout=5)
    rig.cut("beta")
    assert_failed(outcomes(ranks), within=25)


def test_a_link_cut_for_five_seconds_only_delays_the_job(start: Start, rig: Rig, tmp_path: Path) -> None:
    ranks = start(timeout=40)
    rig.cut("beta")
    time.sleep(5)
    rig.restore_link("beta")
    (tmp_path / "stop").touch()
    assert all(text.startswith("DONE") for text in outcomes(ranks)), "a rank failed"
    assert not rig.leftovers()


def test_five_percent_packet_loss_only_delays_the_job(start: Start, rig: Rig, tmp_path: Path) -> None:
    ranks = start(timeout=60, count=50_000)
    rig.shape(loss=0.05)
    time.sleep(2)
    (tmp_path / "stop").touch()
    assert all(text.startswith("DONE") for text in outcomes(ranks, 100)), "a rank failed"
