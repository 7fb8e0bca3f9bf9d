"""The training step that `stoker doctor` measures: both precisions alternate, and the process state is restored."""

from __future__ import annotations

import dataclasses
import sys
import time

import pytest
import torch

from stoker.machine import Machine
from stoker.machine.rates import installed_version
from stoker.model import training_step
from stoker.model.training_step import measure_training_step, size_for


@pytest.fixture(scope="module")
def machine() -> Machine:
    return dataclasses.replace(Machine.read(), memory_available=None)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """So small that no engine is worth choosing."""
    monkeypatch.setattr(training_step, "SMALL_WIDTH", 64)
    monkeypatch.setattr(training_step, "BASE_WIDTH", 128)
    monkeypatch.setattr(training_step, "LENGTH", 4)


@pytest.mark.usefixtures("tiny")
def test_both_precisions_are_measured_and_the_process_state_is_restored(machine: Machine) -> None:
    before, random = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(1)
    try:
        found = measure_training_step(machine, 50.0, seconds=0.0)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
    assert torch.equal(torch.get_rng_state(), random)
    assert min(found.fp32, found.bf16) > 0
    assert found.gain == found.fp32 / found.bf16
    assert (found.width, found.layers, found.tokens, found.rounds) == (64, 2, 24, 3)
    assert found.stoker == installed_version("stoker")


@pytest.mark.usefixtures("tiny")
def test_one_side_trains_in_fp32_and_the_other_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[torch.dtype, str]] = []
    optimize = training_step.optimize

    def recorded(model: torch.nn.Module, optimizer: torch.optim.Optimizer, dtype: torch.dtype) -> object:
        done = optimize(model, optimizer, dtype)
        asked.append((dtype, type(optimizer).__name__))
        return done

    monkeypatch.setattr(training_step, "optimize", recorded)
    for step in training_step.sides(64, 3):
        step()
    assert asked == [(torch.float32, "AdamW"), (torch.bfloat16, "AdamW")]


def test_the_sides_alternate_and_are_timed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    now, order = [0.0], ""
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def side(name: str, seconds: float) -> training_step.Step:
        def step() -> None:
            nonlocal order
            order += name
            now[0] += seconds

        return step

    times = training_step.in_turn(side("f", 0.25), side("b", 0.125), seconds=2.0)
    assert set(times[0]) == {0.25}
    assert set(times[1]) == {0.125}
    assert order == "fb" * (2 + 6)
    assert 2.0 <= sum(map(sum, times)) < 2.5


@pytest.mark.parametrize(
    ("gflops", "width", "rows"), [(1.0, 384, 3), (50.0, 384, 6), (200.0, 384, 12), (4000.0, 768, 12)]
)
def test_the_size_follows_the_speed_of_the_machine(gflops: float, width: int, rows: int) -> None:
    assert size_for(gflops) == (width, rows)


def test_too_little_memory_raises_with_the_reason(machine: Machine) -> None:
    with pytest.raises(RuntimeError, match=r"only 1\.0 GB of memory are available; 2 GB are needed"):
        measure_training_step(dataclasses.replace(machine, memory_available=1 << 30), 100.0)


def test_missing_transformers_raises_with_the_reason(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"transformers cannot be imported .*pip install 'stoker\[hf\]'"):
        measure_training_step(machine, 100.0)
