"""benchmarks/many_cores.py: the parts of a predicted step add up, and its bars can fail."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from stoker.kernels.virtual_threads import Region


@pytest.fixture
def many_cores(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    for name, value in {
        "KINETO_LOG_LEVEL": "5",
        "TOKENIZERS_PARALLELISM": "false",
        "STOKER_LINEAR_ENGINE": "stoker",
    }.items():
        monkeypatch.setenv(name, value)  # the script sets them for its process
    import many_cores  # type: ignore[import-not-found]

    return many_cores  # type: ignore[no-any-return]


def _region(kernel: str, pieces: int, work: float, makespan: float, **more: Any) -> Region:
    found = {"threads": 4, "calls": 2, "longest": makespan, "measured": work, "units": 2 * pieces, **more}
    return Region(kernel=kernel, place="f:1", fewest=pieces, work=work, makespan=makespan, **found)


def test_a_step_is_host_time_and_makespans_and_waking_and_divided_operators(many_cores: ModuleType) -> None:
    regions = [_region("stoker_a", 100, 4.0, 1.0), _region("stoker_b", 1, 2.0, 2.0, threads=1, measured=2.5)]
    operators = [
        many_cores.Operator("aten::mm", 1000, 3, 4.0),  # among all threads, however small
        many_cores.Operator("aten::add", 2 * 32768, 1, 1.0),  # enough for two threads
        many_cores.Operator("aten::mul", 32768, 1, 9.0),  # not divided: belongs to the host
        many_cores.Operator("aten::item", 10**9, 1, 9.0),
    ]
    found = many_cores.of_run(regions, operators, 12.0, 4, cost=lambda threads: 0.01 * threads)
    assert found.host == pytest.approx(12.0 - 4.0 - 2.5 - 5.0)
    assert found.kernels == pytest.approx(3.0)
    assert found.torch == pytest.approx(4.0 / 4 + 1.0 / 2)
    # Two calls on four threads, none for the region on one, three products on four, one sum on two.
    assert found.waking == pytest.approx(0.01 * (2 * 4 + 3 * 4 + 2))
    assert found.step == pytest.approx(0.5 + 3.0 + 1.5 + 0.22)
    assert found.efficiency == pytest.approx(6.0 / (4 * 3.0))
    assert found.imbalance == pytest.approx(3.0 - 6.0 / 4)


def test_work_that_other_code_divides_is_named(many_cores: ModuleType) -> None:
    ours, theirs = _region("stoker_a", 10, 3.0, 1.0), _region("stoker_blas_product", 0, 1.0, 0.25)
    found = many_cores.of_run([ours, theirs], [], 4.0, 4)
    assert found.even == 1.0
    table = many_cores.losses_table([ours, theirs], found)
    assert "25% of the work is MKL's" in table


def test_what_kernels_lose_and_which_have_too_few_pieces(many_cores: ModuleType) -> None:
    regions = [
        _region("stoker_even", 400, 4.0, 1.0),
        _region("stoker_uneven", 3, 3.96, 3.0),
        _region("stoker_small", 1, 0.04, 0.04),
    ]
    names = [name for name, *_ in many_cores.losses(regions, 4)]
    assert names == ["uneven", "small", "even"]
    _, work, lost, efficiency = many_cores.losses(regions, 4)[0]
    assert work == pytest.approx(3.96 / 8)
    assert lost == pytest.approx((12.0 - 3.96) / (4 * 4.04))
    assert efficiency == pytest.approx(0.33)
    assert [region.kernel for region in many_cores.too_few(regions, 4)] == [
        "stoker_uneven"
    ]  # the small one is below 1%


def test_an_efficiency_below_its_bar_is_missed(many_cores: ModuleType) -> None:
    def at(threads: int, efficiency: float) -> bool:
        regions = [_region("stoker_a", 1000, threads * efficiency, 1.0)]
        return bool(many_cores.of_run(regions, [], 0.0, threads).missed)

    assert [at(56, 0.86), at(56, 0.83), at(112, 0.76), at(112, 0.70), at(32, 0.10)] == [False, True, False, True, False]


def test_the_tool_runs_on_a_tiny_model(
    many_cores: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from train_step import Case, build_model, loss_of  # type: ignore[import-not-found]
    from training_step import optimized_step  # type: ignore[import-not-found]

    def tiny(layers: int | None, data: Path) -> Any:
        case = Case("tiny", 48, layers or 2, "qa", ((9, 30, 21),), 32)
        return optimized_step(build_model(case), loss_of(case, 32))

    monkeypatch.setattr(many_cores, "CASES", {"tiny": many_cores.Case("Tiny", tiny)})
    words = ["--case", "tiny", "--layers", "1", "--out", str(tmp_path)]
    assert many_cores.main([*words, "--threads", "2", "56"]) == 1  # 60 tokens are not enough work for 56 threads
    shown = capsys.readouterr().out
    assert "Tiny, 1 layers" in shown
    assert "MISSED" in shown
    assert "regions with fewer pieces than threads" in shown
    stored = json.loads((tmp_path / "many_cores.json").read_text())["cases"]["tiny"]
    few, many = (many_cores.Prediction(**one) for one in stored["predictions"])
    assert (few.threads, many.threads) == (2, 56)
    assert 0 < many.kernels <= many.work
    assert few.host > 0
    assert (tmp_path / "many_cores.svg").read_text().startswith("<?xml")
    assert many_cores.main(["--draw", "--out", str(tmp_path)]) == 0
    assert (
        f"_EFFICIENCY = ((1, 1.0), (2, {few.efficiency:.2f}), (56, {many.efficiency:.2f}))" in capsys.readouterr().out
    )
