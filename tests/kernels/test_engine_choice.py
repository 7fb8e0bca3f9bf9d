"""Measuring engines: once per class, within bounds of time and memory, whatever an earlier process stored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from stoker.kernels import engines, microkernels, products


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("STOKER_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("STOKER_LINEAR_ENGINE", raising=False)
    engines.clear_cache()
    yield
    engines.clear_cache()


def test_a_stored_engine_that_no_longer_exists_is_replaced_once(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(products, "ENGINES", ("torch", "stoker", "openblas"))  # as an earlier version had it
    monkeypatch.setattr(engines, "measure_fastest", lambda *_: "openblas")
    assert engines.choose("nt", 300, 256, 256, torch.float32) == "openblas"
    engines.clear_cache()
    measured: list[int] = []
    monkeypatch.setattr(products, "ENGINES", ("torch", "stoker"))
    monkeypatch.setattr(engines, "measure_fastest", lambda *_: measured.append(1) or "stoker")
    assert [engines.choose("nt", 300, 256, 256, torch.float32) for _ in range(3)] == ["stoker"] * 3
    engines.clear_cache()
    assert engines.choose("nt", 300, 256, 256, torch.float32) == "stoker"
    assert measured == [1]
    stored = json.loads((tmp_path / "engines.json").read_text())
    assert [engine for choices in stored.values() for engine in choices.values()] == ["stoker"]


@pytest.mark.parametrize("limit", ["ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY"])
def test_choices_measured_with_a_lowered_instruction_set_are_stored_separately(monkeypatch, limit: str) -> None:
    """Otherwise one run with such a limit would keep later runs from using the CPU's bf16 units."""
    for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY"):
        monkeypatch.delenv(name, raising=False)
    fastest = {"": "torch", "AVX2": "stoker"}
    for value in ("", "AVX2", ""):
        monkeypatch.setenv(limit, value)
        engines.clear_cache()
        monkeypatch.setattr(engines, "measure_fastest", lambda *_, value=value: fastest[value])
        assert engines.choose("nt", 300, 256, 256, torch.float32) == fastest[value]


@pytest.mark.parametrize(
    ("kind", "sizes", "expected"),
    [
        ("nt", (4096, 3072, 768), (4096, 3072, 768)),  # BERT-base at 8 x 512 tokens
        ("nt", (16384, 50257, 768), (256, 50257, 768)),  # GPT-2's vocabulary
        ("nn", (16384, 768, 50257), (256, 768, 50257)),
        ("tn", (50257, 768, 16384), (50257, 768, 256)),
        ("nt", (16384, 250002, 4096), (64, 250002, 4096)),
    ],
)
def test_a_trial_has_few_enough_tokens(kind: str, sizes: tuple[int, ...], expected: tuple[int, ...]) -> None:
    assert engines._shrunk(kind, *sizes) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_choice_that_is_known_opens_no_file(monkeypatch, dtype: torch.dtype) -> None:
    """It is made for every product of a step."""
    first = engines.choose("nt", 300, 256, 256, dtype)
    opened: list[str] = []
    monkeypatch.setattr(Path, "read_text", lambda self, *_, **__: opened.append(str(self)) or "")
    assert engines.choose("nt", 300, 256, 256, dtype) == first
    assert opened == []


def test_slow_trials_are_few(monkeypatch) -> None:
    now = [0.0]

    def run(engine: str) -> float:
        now[0] += 1.0
        return {"torch": 1.0, "stoker": 0.5}[engine]

    monkeypatch.setattr(engines, "make_trial", lambda *_: run)
    monkeypatch.setattr(engines.time, "perf_counter", lambda: now[0])
    assert engines.measure_fastest("nt", 64, 64, 64, torch.float32, ("torch", "stoker")) == "stoker"
    assert now[0] == 6.0, "one round to warm up and two that count"


@pytest.mark.usefixtures("every_engine")
def test_an_engine_without_fp32_sums_is_no_candidate_for_gradients_of_weights(monkeypatch) -> None:
    offered: dict[str, tuple[str, ...]] = {}

    def note(kind: str, *given: Any) -> str:
        offered[kind] = given[-1]
        return "stoker"

    monkeypatch.setattr(microkernels, "torch_has_bf16_units", lambda: True)
    monkeypatch.setattr(engines, "measure_fastest", note)
    for kind in ("nt", "nn", "tn"):
        engines.choose(kind, 1111, 1111, 1111, torch.bfloat16)
    assert offered == {"nt": products.ENGINES, "nn": products.ENGINES, "tn": ("stoker", "onednn")}
