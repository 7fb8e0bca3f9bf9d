"""Virtual threads give the results of real ones, and their times add up."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from stoker.kernels import native
from stoker.kernels.linear import linear
from stoker.kernels.norm import layer_norm
from stoker.kernels.virtual_threads import Region, table, virtual_threads


def _norm_with_gradients(rows: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(shape, requires_grad=True) for shape in ((rows, 256), (256,), (256,)))
    y = layer_norm(x, weight, bias, 1e-5)
    y.backward(torch.randn_like(y))
    return [y.detach(), x.grad, weight.grad, bias.grad]  # type: ignore[list-item]


def test_results_are_those_of_real_threads_and_every_region_is_recorded() -> None:
    real = _norm_with_gradients(3000)
    with virtual_threads(56) as regions:
        virtual = _norm_with_gradients(3000)
    for one, other in zip(real, virtual, strict=True):
        assert torch.equal(one, other)
    found = regions()
    assert {region.kernel for region in found} >= {"stoker_layer_norm_forward", "stoker_layer_norm_backward"}
    for region in found:
        assert region.makespan <= region.work <= region.threads * region.makespan * 1.000001, region
        assert region.longest <= region.makespan, region
        assert region.work <= region.measured, region
        assert 0 < region.efficiency(56) <= 1.000001, region


def test_a_linear_layer_is_divided_by_its_tiles() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(500, 256), torch.randn(512, 256)
    real = linear(x, weight, engine="stoker")  # else a measurement chooses the engine for each number of threads
    with virtual_threads(7) as regions:
        assert torch.equal(linear(x, weight, engine="stoker"), real)
    assert max(region.threads for region in regions()) == 7


def test_fewer_pieces_than_threads_leave_the_others_idle() -> None:
    with virtual_threads(64) as regions:
        _norm_with_gradients(2)  # a row for one thread each at most
    forward = next(region for region in regions() if region.kernel == "stoker_layer_norm_forward")
    assert forward.fewest == 2
    assert forward.efficiency(64) <= 2 / 64


def test_afterwards_threads_are_real_again() -> None:
    before = torch.get_num_threads()
    with virtual_threads(1000) as regions:
        assert native.threads() == 1000
        assert torch.get_num_threads() == 1
    assert native.threads() == torch.get_num_threads() == before
    _norm_with_gradients(100)
    assert regions() == []  # what runs on real threads is not recorded


def _region(name: str, pieces: int, work: float, makespan: float) -> Region:
    return Region(name, "f:1", 4, 2, pieces, pieces // 2, work, makespan, makespan, work)


def test_the_table_starts_with_what_loses_most() -> None:
    even, uneven = _region("stoker_even", 400, 4.0, 1.0), _region("stoker_uneven", 4, 4.0, 3.0)
    lines = table([even, uneven], threads=4).splitlines()
    assert lines[0] == "4 virtual threads: 8.000 s of work would take 4.0000 s, efficiency 0.50"
    assert lines[2].split() == ["uneven,", "f:1", "2", "2", "2", "50.0%", "100.0%", "0.33"]
    assert lines[3].split() == ["even,", "f:1", "2", "200", "200", "50.0%", "0.0%", "1.00"]
    assert table([], 4) == "4 virtual threads: no kernel was called"


@pytest.mark.parametrize(
    ("count", "expected"),
    [("5", "5 virtual threads: "), ("0", "is not a number from 1 to 4096"), ("many", "is not a number")],
)
def test_a_whole_program_runs_on_virtual_threads(count: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_VIRTUAL_THREADS", count)
    script = (
        "import torch; from stoker.kernels.norm import layer_norm;"
        "layer_norm(torch.ones(64, 32), torch.ones(32), torch.zeros(32), 1e-5)"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert expected in run.stderr
    assert (run.returncode == 0) == (count == "5")
