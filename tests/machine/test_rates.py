"""Rates are measured within their time, kept per machine, and a cache that fails costs a measurement and nothing else."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from stoker.machine import Machine, cache_directory, rates
from stoker.machine.rates import STEPS, Rates

Recorded = Callable[[str], Machine]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STOKER_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def here() -> Machine:
    return Machine.read()


@pytest.fixture(scope="module")
def measured(here: Machine) -> Rates:
    return rates.measure(here, seconds=1.5)


def test_measured_rates_are_plausible(measured: Rates, here: Machine) -> None:
    assert measured.threads == here.usable_threads
    assert measured.fp32_one > 0.5  # GFLOP/s: any CPU of this century
    assert measured.fp32_all > 0
    assert measured.bandwidth_all > 0.1
    assert measured.torch == torch.__version__


def test_measuring_says_each_step_and_leaves_threads_as_they_were(here: Machine) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        steps: list[str] = []
        found = rates.measure(here, seconds=0.3, progress=steps.append, clock=lambda threads: 2.0 + threads)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
    assert steps == list(STEPS)
    assert found.clock_one == 3.0
    assert found.clock_all == 2.0 + here.usable_threads


@pytest.mark.parametrize("gflops", [0.2, 2.0, 150.0, 20_000.0])
def test_measuring_keeps_to_its_time_on_slow_and_fast_machines(
    gflops: float, here: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]  # a clock that only the products move

    def product(left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor) -> None:
        now[0] += 2 * left.shape[0] ** 3 / gflops / 1e9

    def triad(left: torch.Tensor, right: torch.Tensor, *, alpha: float, out: torch.Tensor) -> None:
        now[0] += 12 * left.numel() / 10e9

    monkeypatch.setattr("stoker.machine.rates.time.perf_counter", lambda: now[0])
    monkeypatch.setattr(torch, "mm", product)
    monkeypatch.setattr(torch, "add", triad)
    found = rates.measure(here, seconds=6.0)
    assert found.seconds < 6.6
    assert found.fp32_all == pytest.approx(gflops, rel=0.01)
    assert found.bandwidth_one == pytest.approx(10.0, rel=0.01)


def test_rates_are_kept_per_machine(measured: Rates, here: Machine, recorded: Recorded, cache: Path) -> None:
    assert rates.known(here) is None
    assert rates.forgotten_reason(here, measured) is None
    assert rates.known(here) == measured
    assert rates.known(recorded("genoa")) is None
    assert [path.name for path in cache.iterdir()] == [f"rates-{here.fingerprint}.json"]  # no temporary file is left


def test_a_second_look_only_raises_what_is_kept(measured: Rates, here: Machine, cache: Path) -> None:
    low, high = (dataclasses.replace(measured, fp32_all=value) for value in (0.01, 1e9))
    rates.forgotten_reason(here, low)
    found = rates.raised(here, low, seconds=0.1)
    assert found.fp32_all > 0.01
    assert rates.known(here) == found == dataclasses.replace(low, fp32_all=found.fp32_all)
    assert rates.raised(here, high, seconds=0.1) == high
    assert rates.known(here) == found


def test_rates_of_another_torch_are_not_used(measured: Rates, here: Machine, cache: Path) -> None:
    rates.forgotten_reason(here, dataclasses.replace(measured, torch="1.0.0"))
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
def test_a_spoilt_cache_file_reads_as_none(
    spoil: Callable[[dict[str, object]], str], measured: Rates, here: Machine, cache: Path
) -> None:
    rates.forgotten_reason(here, measured)
    file = cache / f"rates-{here.fingerprint}.json"
    file.write_text(spoil(json.loads(file.read_text())))
    assert rates.known(here) is None


def test_a_cache_that_cannot_be_written_gives_one_sentence(
    measured: Rates, here: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("STOKER_CACHE_DIR", str(tmp_path / "file" / "cache"))
    reason = rates.forgotten_reason(here, measured)
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
