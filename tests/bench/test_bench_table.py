"""The table of `stoker bench` is Markdown of 80 columns, its JSON is valid and names nobody, and the plot can be drawn."""

from __future__ import annotations

import getpass
import json
import math
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from stoker.bench.bench_cases import CASES
from stoker.bench.bench_plot import draw
from stoker.bench.bench_results import Allreduce, Disturbance, HostTime, Pair, Results, machine_lines
from stoker.bench.bench_table import markdown, time_text
from stoker.bench.sides import Measured
from stoker.machine import Machine


def pair(case: str, precision: str, seconds: float, rival: str = "stock", threads: int = 112) -> Pair:
    title = CASES[case].title if case in CASES else "BERT-base QA"
    stock = Measured([seconds * 4] * 3, [1.0, math.nan], [10, 10, 10], 4 << 30)
    return Pair(
        case, title, precision, rival, threads, "3 of 12 layers", stock, Measured([seconds] * 3, [], [8, 8, 8], 1 << 30)
    )


@pytest.fixture
def results(recorded_root: Callable[[str], Path]) -> Results:
    found = Results(Machine.read(recorded_root("genoa")), {"Stoker": "0.1.0", "torch": "2.13.0+cpu"})
    found.steps = [pair(case, precision, 0.1) for case in CASES for precision in ("fp32", "bf16")]
    found.sweep = [pair("threads", "fp32", 1.0 / threads, threads=threads) for threads in (112, 64, 32, 1)]
    found.host = [HostTime("BERT, 12 layers, QA", {"stock": [0.02] * 3, "stoker": [0.005] * 3})]
    found.allreduce = [Allreduce(8, "one per NUMA node", 400_000_000, {"gloo": 0.5, "ccl": 0.05}, 5)]
    return found


def tables(text: str) -> list[list[list[str]]]:
    found: list[list[list[str]]] = [[]]
    for line in text.splitlines():
        if line.startswith("|"):
            assert line.endswith("|")
            found[-1].append([cell.strip() for cell in line[1:-1].split("|")])
        elif found[-1]:
            found.append([])
    return [table for table in found if table]


def test_every_table_is_markdown_of_80_columns(results: Results) -> None:
    text = markdown(results)
    assert max(map(len, text.splitlines())) <= 80
    steps, host, sweep, allreduce = tables(text)
    for table in (steps, host, sweep, allreduce):
        assert len({len(row) for row in table}) == 1
        assert all(set(cell) <= set(":-") for cell in table[1])
    assert steps[2] == ["BERT-base QA", "fp32", "400 ms", "100 ms", "4.00x", "0.25x"]
    assert [row[0] for row in sweep[2:]] == ["1", "32", "64", "112"]
    assert sweep[-1][-1] == "112.0x"
    assert host[2][-1] == "0.25x"
    assert allreduce[2][-1] == "10.0x"
    assert "(3 of 12 layers)" in text


def test_bf16_without_units_is_compared_with_stock_in_fp32_and_says_so(results: Results) -> None:
    assert "bf16*" in markdown(results)
    assert "no bf16 units" in " ".join(markdown(results).split())
    for one in results.steps:
        one.rival = "stock bf16" if one.precision == "bf16" else "stock"
    assert "bf16*" not in markdown(results)
    assert "no bf16 units" not in " ".join(markdown(results).split())


def test_figures_that_other_programs_disturbed_are_marked(results: Results) -> None:
    results.steps[0].disturbance = Disturbance(others=20.0, stolen=0.0, cpus=112)
    results.steps[1].disturbance = Disturbance(others=2.0, stolen=0.0, cpus=112)
    text = markdown(results)
    assert text.count("4.00x (!)") == 1
    assert "other programs used up to 20.0 CPUs" in " ".join(text.split())
    assert [one["disturbed"] for one in results.to_dict()["steps"][:2]] == [True, False]


def test_json_is_valid_and_names_neither_host_nor_user(results: Results) -> None:
    text = json.dumps(results.to_dict(), allow_nan=False)
    assert json.loads(text)["format"] == 1
    for name in (socket.gethostname(), getpass.getuser(), str(Path.home())):
        assert len(name) < 3 or f'"{name}"' not in text


def test_the_machine_has_three_lines(results: Results) -> None:
    lines = machine_lines(results.machine, results.versions)
    assert len(lines) == 3
    assert "EPYC 9" in lines[0]
    assert "NUMA node" in lines[1]
    assert "torch 2.13.0+cpu" in lines[2]


def test_a_machine_of_which_nothing_is_known_has_three_lines_too(tmp_path: Path) -> None:
    assert len(machine_lines(Machine.read(tmp_path), {})) == 3


def test_what_has_no_figures_is_no_row(results: Results) -> None:
    results.steps[0].stoker = Measured()
    results.sweep, results.host, results.allreduce = [], [], []
    results.interrupted = True
    assert len(tables(markdown(results))) == 1
    assert len(tables(markdown(results))[0]) == 2 + 5
    assert "Interrupted" in markdown(results)
    results.steps.clear()
    assert "Nothing was measured." in markdown(results)
    assert tables(markdown(results)) == []


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_plot_is_drawn_from_whatever_was_measured(results: Results, suffix: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw(results, tmp_path / f"all.{suffix}")
    results.sweep, results.host = results.sweep[:1], []
    draw(results, tmp_path / f"some.{suffix}")
    assert min(file.stat().st_size for file in tmp_path.iterdir()) > 5_000


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (123.4, "123 s"),
        (12.34, "12.3 s"),
        (1.234, "1.23 s"),
        (0.5, "500 ms"),
        (0.00512, "5.12 ms"),
        (2.8e-5, "28.0 us"),
    ],
)
def test_times_have_three_digits(seconds: float, text: str) -> None:
    assert time_text(seconds) == text
