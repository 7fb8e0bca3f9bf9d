"""`stoker doctor`: a page for people, JSON for scripts, on this machine and on every recorded one."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from machine.recorded.machines import MACHINES
from stoker.cli import main
from stoker.machine import Machine, rates
from stoker.machine.load import Load
from stoker.machine.rates import Rates

MEASURED = Rates(2, 80.0, 150.0, 2.0, 2.5, 20.0, 30.0, 3.2, 3.1, "2.13.0", "2026-01-01T00:00:00Z", 6.0, False)


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def busy() -> list[float]:
    """CPUs that other programs keep busy."""
    return [0.0]


@pytest.fixture
def measurements(busy: list[float], monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Replaces the measurement by a figure of its own, and counts how often it is made."""
    made: list[float] = []
    monkeypatch.setattr("stoker.machine.load.watch", lambda: Load(busy=busy[0], stolen=0.0, cpus=2))

    def measure(machine: Machine, *, seconds: float, **rest: object) -> Rates:
        import dataclasses

        import torch

        made.append(seconds)
        found = {"threads": machine.usable_threads, "torch": str(torch.__version__), "disturbed": bool(busy[0])}
        return dataclasses.replace(MEASURED, **found)  # type: ignore[arg-type]

    monkeypatch.setattr(rates, "measure", measure)
    return made


@pytest.mark.parametrize("name", MACHINES)
def test_every_recorded_machine_has_a_page_and_json(
    name: str,
    recorded_root: Callable[[str], Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root = str(recorded_root(name))
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["doctor", "--root", root]) == 0
    page = capsys.readouterr().out
    assert main(["doctor", "--root", root, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    summary = facts["machine"]["summary"]
    assert f"{summary['physical_cores']} physical cores" in page
    assert facts["machine"]["model"]["name"] in page
    assert facts["software"] is None
    assert facts["rates"] is None
    assert {"precision", "processes"} <= {verdict["subject"] for verdict in facts["verdicts"]}
    assert max(map(len, page.splitlines())) <= 100


def test_rates_are_measured_once_and_again_when_asked(
    measurements: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    assert [main(["doctor"]), main(["doctor"]), main(["doctor", "--fresh"])] == [0, 0, 0]
    assert len(measurements) == 2
    assert all(seconds <= 6.0 for seconds in measurements)
    assert "150 GFLOP/s" in capsys.readouterr().out


def test_no_rates_measures_nothing(measurements: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--no-rates", "--json"]) == 0
    assert measurements == []
    assert json.loads(capsys.readouterr().out)["rates"] is None


def test_rates_measured_on_a_busy_machine_are_replaced_on_a_quiet_one(
    measurements: list[float], busy: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    busy[0] = 2.0
    assert [main(["doctor"]), main(["doctor"])] == [0, 0]
    assert len(measurements) == 1
    assert "while other programs ran" in " ".join(capsys.readouterr().out.split())
    busy[0] = 0.0
    assert [main(["doctor"]), main(["doctor"])] == [0, 0]
    assert len(measurements) == 2


def test_an_unwritable_cache_is_one_sentence_and_a_working_run(
    measurements: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("STOKER_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert main(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["rates"]["fp32_all"] == 150.0
    assert len(facts["notes"]) == 1
    assert str(tmp_path / "file" / "cache") in facts["notes"][0]
    assert main(["doctor"]) == 0
    assert "could not be kept" in capsys.readouterr().out


def test_json_holds_what_scripts_need(measurements: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert set(facts) == {"stoker", "machine", "software", "load", "rates", "verdicts", "notes"}
    assert facts["machine"]["summary"]["usable_cpus"] == sorted(os.sched_getaffinity(0))
    assert facts["software"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert facts["software"]["torch"]["backends"]
    if facts["rates"]["fp32_peak"]:
        assert facts["rates"]["fp32_reached"] == pytest.approx(150.0 / facts["rates"]["fp32_peak"])
