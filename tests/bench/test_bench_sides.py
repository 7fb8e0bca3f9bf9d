"""Sides of a comparison run in processes of their own, and whatever happens to one of them is one sentence for the others."""

from __future__ import annotations

import functools
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from stoker.bench.sides import Measured, Side, SideFailed, Step, measure

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def sleeper(seconds: float = 0.0, value: float | None = None) -> Step:
    def step(number: int) -> float | None:
        time.sleep(seconds)
        return value

    return step


def broken() -> Step:
    raise ValueError("no such model")


def dies_at(last: int) -> Step:
    def step(number: int) -> None:
        if number == last:
            os._exit(1)

    return step


def own_version() -> Step:
    import stoker

    assert stoker.__version__ == "other", stoker.__file__
    return sleeper()


def test_sides_take_the_same_steps_in_turn() -> None:
    lines: list[str] = []
    results = measure({"a": functools.partial(sleeper, value=1.0), "b": sleeper}, 3, 1, lines.append)
    assert [len(results[name].seconds) for name in "ab"] == [3, 3]
    assert results["a"].losses == [1.0] * 3
    assert results["b"].losses == []
    assert lines[-1].startswith("  step 3/3: a ")
    assert results["a"].peak_bytes > 1e6


def test_a_side_that_fails_is_left_out_and_the_others_go_on(capfd: pytest.CaptureFixture[str]) -> None:
    results = measure(
        {"broken": broken, "ends": functools.partial(dies_at, 1), "good": sleeper}, 2, 0, lambda line: None
    )
    assert results["broken"].note == "ValueError: no such model"
    assert results["ends"].note == "its process died (out of memory?)"
    assert len(results["ends"].seconds) == 1
    assert len(results["good"].seconds) == 2


def test_ctrl_c_does_not_reach_a_side() -> None:
    side = Side(sleeper)
    side.wait_until_built()
    os.kill(side.process.pid, signal.SIGINT)
    assert side.take(0).value is None
    side.close()
    assert not side.process.is_alive()


def test_a_side_that_does_not_answer_is_given_up() -> None:
    side = Side(functools.partial(sleeper, 60.0))
    side.wait_until_built()
    with pytest.raises(SideFailed, match="did not answer"):
        side.take(0, timeout=0.1)
    side.close(patience=0.0)
    assert not side.process.is_alive()


def test_ratios_are_those_within_a_step() -> None:
    slow, fast = Measured([1.0, 2.0, 8.0]), Measured([0.5, 0.5, 4.0])
    assert fast.faster_than(slow) == 2.0


def test_an_earlier_version_is_measured_with_its_own_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stoker").mkdir()
    (tmp_path / "stoker" / "__init__.py").write_text("__version__ = 'other'\n")
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    import train_step

    build = functools.partial(train_step.before, own_version, str(tmp_path), str(tmp_path))
    results = measure({"before": build}, 1, 0, lambda line: None)
    assert results["before"].note == ""
    assert len(results["before"].seconds) == 1
