"""The efficiencies that estimates of time use are those of benchmarks/many_cores.py in docs/figures."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest

from stoker.hf import core_scaling
from stoker.hf.core_scaling import efficiency, host_seconds


def test_efficiencies_are_the_least_of_the_cases_in_the_figures() -> None:
    cases = json.loads((Path(__file__).parents[2] / "docs" / "figures" / "many_cores.json").read_text())["cases"]
    assert set(cases) == {"bert-qa", "embeddings", "smollm2-lora"}
    least: dict[int, float] = defaultdict(lambda: 1.0)
    for case in cases.values():
        for one in case["predictions"]:
            share = one["work"] / (one["threads"] * one["kernels"])
            least[one["threads"]] = min(least[one["threads"]], share)
    assert {cores: share for cores, share in core_scaling._EFFICIENCY if cores > 1} == pytest.approx(least, abs=0.006)


def test_more_cores_are_kept_busy_less_and_never_make_a_step_slower() -> None:
    cores = [1, 2, 3, 7, 16, 20, 56, 100, 112, 200, 448]
    for tokens in (10, 2000, 10**6):
        shares = [efficiency(count, tokens) for count in cores]
        assert shares[0] == 1.0
        assert shares == sorted(shares, reverse=True)
        rates = [count * share for count, share in zip(cores, shares, strict=True)]
        assert rates == pytest.approx(sorted(rates))
    for count, share in core_scaling._EFFICIENCY:
        assert efficiency(count, 10**6) == pytest.approx(share)
    assert efficiency(448, 10**6) == pytest.approx(efficiency(112, 10**6) / 4)  # beyond the figures, no faster


def test_cores_without_tokens_are_idle() -> None:
    few = 10 * core_scaling._TOKENS
    assert efficiency(8, few) == efficiency(8, 10**6)
    assert 100 * efficiency(100, few) == pytest.approx(10 * efficiency(10, few))
    assert efficiency(8, 1) == pytest.approx(1 / 8)


def test_host_time_grows_with_layers_and_with_the_threads_to_wake() -> None:
    assert host_seconds(0, 1) == host_seconds(0, 100) == core_scaling._STEP
    assert host_seconds(100, 1) - host_seconds(0, 1) == pytest.approx(100 * core_scaling._LAYER)
    assert host_seconds(100, 1) < host_seconds(100, 2) < host_seconds(100, 112)
