"""`stoker doctor`: a page for people, JSON for scripts, on this machine and on every recorded one."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from machine.recorded.machines import MACHINES
from stoker.cli import main
from stoker.kernels import native
from stoker.machine import Machine, cache_directory, measure, rates
from stoker.machine.load import Load
from stoker.machine.rates import Rates, TrainingStep, installed_version

MEASURED = Rates(2, 80.0, 150.0, 2.0, 2.5, 20.0, 30.0, 3.2, 3.1, "2.13.0", "2026-01-01T00:00:00Z", 6.0, False)

STEP = TrainingStep(0.3, 0.2, 384, 2, 1536, 7, installed_version("stoker"), "2026-01-01T00:00:00Z", False)


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
    monkeypatch.setattr("stoker.machine.load.current_load", lambda: Load(busy=busy[0], stolen=0.0, cpus=2))

    def measure_rates(machine: Machine, *, seconds: float, **rest: object) -> Rates:
        import torch

        made.append(seconds)
        found = {
            "threads": machine.usable_threads,
            "torch": str(torch.__version__),
            "disturbed": bool(busy[0]),
        }
        return dataclasses.replace(MEASURED, **found)  # type: ignore[arg-type]

    monkeypatch.setattr(measure, "measure_rates", measure_rates)
    return made


@pytest.fixture(autouse=True)
def steps(busy: list[float], monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Replaces the training step by one of given figures, and collects the rates it was measured for."""
    made: list[float] = []

    def measure_training_step(machine: Machine, fp32_gflops: float) -> TrainingStep:
        made.append(fp32_gflops)
        return dataclasses.replace(STEP, disturbed=bool(busy[0]))

    monkeypatch.setattr("stoker.model.training_step.measure_training_step", measure_training_step)
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


def test_rates_are_measured_once_and_again_with_fresh(
    measurements: list[float], steps: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    assert [main(["doctor"]), main(["doctor"]), main(["doctor", "--fresh"])] == [0, 0, 0]
    assert len(measurements) == 2
    assert steps == [150.0, 150.0]
    assert all(seconds <= 6.0 for seconds in measurements)
    assert "150 GFLOP/s" in capsys.readouterr().out


def test_no_rates_measures_nothing(
    measurements: list[float], steps: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--no-rates", "--json"]) == 0
    assert measurements == steps == []
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


def test_a_missing_or_disturbed_step_is_measured_without_measuring_the_rates_again(
    measurements: list[float], steps: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    machine = Machine.read()
    assert main(["doctor"]) == 0
    whole = rates.known(machine)
    assert whole is not None
    assert whole.step == STEP
    for step in (None, dataclasses.replace(STEP, disturbed=True), dataclasses.replace(STEP, stoker="0.0.1")):
        rates.save(machine, dataclasses.replace(whole, step=step))
        assert main(["doctor"]) == 0
        assert rates.known(machine) == whole
    assert (len(measurements), len(steps)) == (1, 4)


def test_rates_of_an_older_version_are_measured_again(
    measurements: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    machine = Machine.read()
    assert main(["doctor"]) == 0
    (file,) = cache_directory.cache_directory().glob("rates-*.json")  # type: ignore[union-attr]
    old = {**json.loads(file.read_text()), "format": 1}
    del old["rates"]["step"], old["rates"]["clock_bf16"]
    file.write_text(json.dumps(old))
    assert [main(["doctor"]), main(["doctor"])] == [0, 0]
    assert len(measurements) == 2
    assert rates.known(machine) is not None


@pytest.mark.parametrize("ghz", [None, 3.0])
def test_rates_without_a_clock_are_measured_again_once_it_can_be_measured(
    ghz: float | None, measurements: list[float], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = Machine.read()
    assert main(["doctor"]) == 0
    rates.save(machine, dataclasses.replace(rates.known(machine), clock_all=None))  # type: ignore[type-var]
    monkeypatch.setattr("stoker.kernels.clock.clock_ghz", lambda threads: ghz)
    assert main(["doctor"]) == 0
    assert len(measurements) == (1 if ghz is None else 2)


def test_a_step_that_cannot_be_measured_adds_a_note_to_the_page(
    measurements: list[float], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(*arguments: object) -> TrainingStep:
        raise native.NativeLibraryError("libstoker-avx2.so was not found in /nowhere;\nreinstall Stoker")

    monkeypatch.setattr("stoker.model.training_step.measure_training_step", missing)
    assert main(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    reason = "libstoker-avx2.so was not found in /nowhere; reinstall Stoker"
    assert facts["notes"] == [f"The training step in fp32 and bf16 could not be measured: {reason}."]
    assert facts["rates"]["step"] is None
    assert facts["rates"]["bf16_training_gain"] is None
    assert main(["doctor"]) == 0
    page = " ".join(capsys.readouterr().out.split())
    assert reason in page
    assert "150 GFLOP/s" in page


def test_an_unwritable_cache_adds_a_note_to_the_page(
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
    assert "could not be stored" in capsys.readouterr().out


def test_json_contains_what_scripts_need(measurements: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert set(facts) == {"stoker", "machine", "software", "load", "rates", "verdicts", "notes"}
    assert facts["machine"]["summary"]["usable_cpus"] == sorted(os.sched_getaffinity(0))
    assert facts["software"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert facts["software"]["torch"]["backends"]
    if facts["rates"]["fp32_peak"]:
        assert facts["rates"]["fp32_reached"] == pytest.approx(150.0 / facts["rates"]["fp32_peak"])
        assert facts["rates"]["fp32_reached"] <= 1.005
    assert facts["rates"]["peak_clock"] == "measured"
    assert facts["rates"]["step"] == dataclasses.asdict(STEP)
    assert facts["rates"]["bf16_training_gain"] == pytest.approx(1.5)
    precision = next(verdict for verdict in facts["verdicts"] if verdict["subject"] == "precision")
    assert precision["text"].startswith("bf16 trains 1.50 times as fast as fp32 on this machine (measured step: ")
