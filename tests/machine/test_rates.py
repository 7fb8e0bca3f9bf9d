"""Rates are measured within their time, kept per machine, and a cache that fails costs a measurement and nothing else."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from stoker.machine import Machine, cache_directory, rates
from stoker.machine.measure import STEPS, measure_rates, remeasure
from stoker.machine.rates import Rates, TrainingStep, installed_version

Recorded = Callable[[str], Machine]

LOWERED_BY = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "STOKER_ISA")
STEP = TrainingStep(0.2, 0.16, 384, 2, 1536, 7, installed_version("stoker"), "2026-01-01T00:00:00Z", False)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STOKER_CACHE_DIR", str(tmp_path / "cache"))
    for setting in LOWERED_BY:  # they are part of the file's name
        monkeypatch.delenv(setting, raising=False)
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def here() -> Machine:
    return Machine.read()


@pytest.fixture(scope="module")
def measured(here: Machine) -> Rates:
    return measure_rates(here, clock=None, seconds=1.5)


def test_measured_rates_are_plausible(measured: Rates, here: Machine) -> None:
    assert measured.threads == here.usable_threads
    assert measured.fp32_one > 0.5  # GFLOP/s: any CPU of this century
    assert measured.fp32_all > 0
    assert measured.bandwidth_all > 0.1
    assert measured.torch == torch.__version__


def test_measuring_reports_each_step_and_restores_the_thread_count(here: Machine) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        steps: list[str] = []
        found = measure_rates(here, seconds=0.3, progress=steps.append, clock=lambda threads: 2.0 + threads)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
    assert steps == list(STEPS)
    assert (found.clock_one, found.clock_all, found.clock_bf16) == (3.0, 3.0, 3.0)  # one core's, whatever the threads


def test_the_clock_is_measured_while_products_run(here: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    product, made, seen = torch.mm, threading.Semaphore(0), []

    def counted(*matrices: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        made.release()
        return product(*matrices, out=out)

    def clock(threads: int) -> float:
        while made.acquire(blocking=False):
            pass
        # Products from before the call do not count; two, because one may have begun before it.
        seen.append(made.acquire(timeout=60) and made.acquire(timeout=60))
        return 2.0 + len(seen) % 2

    monkeypatch.setattr(torch, "mm", counted)
    found = measure_rates(here, clock=clock, seconds=0.3)
    assert seen == [True] * 8  # twice for each of the four products
    assert (found.clock_one, found.clock_all, found.clock_bf16) == (3.0, 3.0, 3.0)  # the higher of the two


def test_a_clock_that_cannot_be_measured_is_none(here: Machine) -> None:
    found = measure_rates(here, clock=lambda threads: None, seconds=0.3)
    assert (found.clock_one, found.clock_all, found.clock_bf16) == (None, None, None)


@pytest.mark.parametrize("gflops", [0.2, 2.0, 150.0, 20_000.0])
def test_measuring_respects_its_time_limit_on_slow_and_fast_machines(
    gflops: float, here: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]  # a clock that only the products move

    def product(left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor) -> None:
        now[0] += 2 * left.shape[0] ** 3 / gflops / 1e9

    def triad(left: torch.Tensor, right: torch.Tensor, *, alpha: float, out: torch.Tensor) -> None:
        now[0] += 12 * left.numel() / 10e9

    monkeypatch.setattr("stoker.machine.measure.time.perf_counter", lambda: now[0])
    monkeypatch.setattr(torch, "mm", product)
    monkeypatch.setattr(torch, "add", triad)
    found = measure_rates(here, clock=None, seconds=6.0)
    assert found.seconds < 6.6
    assert found.fp32_all == pytest.approx(gflops, rel=0.01)
    assert found.bandwidth_one == pytest.approx(10.0, rel=0.01)


def test_rates_are_stored_per_machine(measured: Rates, here: Machine, recorded: Recorded, cache: Path) -> None:
    assert rates.known(here) is None
    assert rates.save(here, measured) is None
    assert rates.known(here) == measured
    assert rates.known(recorded("genoa")) is None
    assert [path.name for path in cache.iterdir()] == [f"rates-{here.fingerprint}.json"]  # no temporary file is left


def test_remeasuring_only_raises_stored_rates(measured: Rates, here: Machine, cache: Path) -> None:
    low, high = (dataclasses.replace(measured, fp32_all=value) for value in (0.01, 1e9))
    rates.save(here, low)
    found = remeasure(here, low, clock=None, seconds=0.1)
    assert found.fp32_all > 0.01
    assert rates.known(here) == found == dataclasses.replace(low, fp32_all=found.fp32_all)
    assert remeasure(here, high, clock=None, seconds=0.1) == high
    assert rates.known(here) == found


@pytest.mark.parametrize(("bf16", "rate", "ghz"), [(False, "fp32_all", "clock_all"), (True, "bf16_all", "clock_bf16")])
def test_remeasuring_updates_product_and_clock_together(
    bf16: bool, rate: str, ghz: str, measured: Rates, here: Machine, cache: Path
) -> None:
    low = dataclasses.replace(measured, **{rate: 0.001, ghz: 2.5})
    for clock, expected in ((3.5, 3.5), (1.5, 2.5), (None, 2.5)):
        found = remeasure(here, low, clock=lambda threads, clock=clock: clock, bf16=bf16, seconds=0.05)
        assert getattr(found, ghz) == expected
        assert found == dataclasses.replace(low, **{rate: getattr(found, rate), ghz: expected})


def test_the_training_step_is_stored_with_the_rates(measured: Rates, here: Machine, cache: Path) -> None:
    assert rates.bf16_training_gain(here) is None
    rates.save(here, measured)
    assert rates.bf16_training_gain(here) is None
    complete = dataclasses.replace(measured, step=STEP)
    rates.save(here, complete)
    assert rates.known(here) == complete
    assert rates.bf16_training_gain(here) == pytest.approx(1.25)
    assert remeasure(here, complete, clock=None, seconds=0.05).step == STEP
    rates.save(here, dataclasses.replace(measured, step=dataclasses.replace(STEP, disturbed=True)))
    assert rates.bf16_training_gain(here) is None  # too uncertain to choose a precision by


@pytest.mark.parametrize(
    "change",
    [
        {"stoker": "0.0.1"},
        {"bf16": 0.0},
        {"bf16": None},
        {"rounds": True},
        {"disturbed": 0},
        {"measured": 3},
        {"new": 1.0},
    ],
)
def test_an_outdated_or_damaged_step_is_dropped_and_the_rates_are_kept(
    change: dict[str, object], measured: Rates, here: Machine, cache: Path
) -> None:
    rates.save(here, dataclasses.replace(measured, step=STEP))
    file = cache / f"rates-{here.fingerprint}.json"
    data = json.loads(file.read_text())
    data["rates"]["step"].update(change)
    file.write_text(json.dumps(data))
    assert rates.known(here) == dataclasses.replace(measured, step=None)


def test_a_file_of_the_first_format_is_measured_again(measured: Rates, here: Machine, cache: Path) -> None:
    # It may hold rates without a clock, or with one that was measured beside the products.
    old = {name: value for name, value in dataclasses.asdict(measured).items() if name not in {"clock_bf16", "step"}}
    cache_directory.save(f"rates-{here.fingerprint}.json", {"format": 1, "rates": old})
    assert rates.known(here) is None
    assert rates.save(here, measured) is None
    assert rates.known(here) == measured


@pytest.mark.parametrize("name", LOWERED_BY)
def test_rates_measured_with_fewer_instruction_sets_are_stored_separately(
    name: str, measured: Rates, here: Machine, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "avx2")
    rates.save(here, dataclasses.replace(measured, fp32_all=1.0))
    assert rates.known(here) is not None
    monkeypatch.delenv(name)
    assert rates.known(here) is None


def test_rates_of_another_torch_are_not_used(measured: Rates, here: Machine, cache: Path) -> None:
    rates.save(here, dataclasses.replace(measured, torch="1.0.0"))
    assert rates.known(here) is None


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: "",
        lambda data: "{not json",
        lambda data: "[]",
        lambda data: json.dumps({**data, "format": 0}),
        lambda data: json.dumps({**data, "rates": {}}),
        lambda data: json.dumps({**data, "rates": {**data["rates"], "fp32_all": "fast"}}),
        lambda data: json.dumps({**data, "rates": {**data["rates"], "fp32_all": float("nan")}}),
        lambda data: json.dumps({**data, "rates": {**data["rates"], "bf16_one": -1.0}}),
        lambda data: json.dumps({**data, "rates": {**data["rates"], "disturbed": 3}}),
        lambda data: "\udcff".encode("utf-8", "surrogateescape").decode("latin-1"),
    ],
)
def test_a_damaged_cache_file_counts_as_missing(
    spoil: Callable[[dict[str, object]], str], measured: Rates, here: Machine, cache: Path
) -> None:
    rates.save(here, measured)
    file = cache / f"rates-{here.fingerprint}.json"
    file.write_text(spoil(json.loads(file.read_text())))
    assert rates.known(here) is None


def test_a_cache_that_cannot_be_written_is_reported_in_one_sentence(
    measured: Rates, here: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("STOKER_CACHE_DIR", str(tmp_path / "file" / "cache"))
    reason = rates.save(here, measured)
    assert reason is not None
    assert str(tmp_path / "file" / "cache") in reason
    assert "\n" not in reason
    assert rates.known(here) is None


def test_a_failed_write_keeps_the_old_file(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache_directory.save("a.json", {"value": 1})

    def fail(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="No space left"):
        cache_directory.save("a.json", {"value": 2})
    monkeypatch.undo()
    assert json.loads((cache / "a.json").read_text()) == {"value": 1}
    assert [path.name for path in cache.iterdir()] == ["a.json"]


def test_the_cache_directory_follows_xdg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STOKER_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory.cache_directory() == tmp_path / "stoker"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_directory.cache_directory() == tmp_path / ".cache" / "stoker"
    monkeypatch.setenv("STOKER_CACHE_DIR", str(tmp_path / "own"))
    assert cache_directory.cache_directory() == tmp_path / "own"
