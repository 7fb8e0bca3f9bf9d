"""What `stoker bench` does when all goes well, when it is interrupted, and when something does not fit, fails or is too slow.

Sides answer from this process here, with times that a test chooses; one test runs the command with real, tiny models.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from stoker.bench import bench_run, bench_stages
from stoker.bench.bench_cases import Cores
from stoker.bench.bench_results import Results
from stoker.bench.bench_stages import FULL, QUICK, STAGES, Budget, Progress
from stoker.bench.bench_table import markdown
from stoker.bench.sides import SideFailed, Taken
from stoker.cli import main
from stoker.machine import Machine
from stoker.machine.load import Load

SHORT = {**dict.fromkeys(STAGES, 1.0), "host": 0.01, "allreduce": 0.01, "threads": 30.0}


@dataclass
class World:
    """What the sides of a test answer."""

    step_seconds: float = 0.1
    """Of a step of stock with all threads; Stoker takes a quarter of it."""
    bf16_units: bool = True
    fails: str = ""
    """The side that raises an error when it is built."""
    interrupt_after: int | None = None
    taken: int = 0
    started: int = 0
    closed: int = 0
    asked: list[tuple[str, Any]] = None  # type: ignore[assignment]

    def answer(self, name: str, argument: Any) -> Taken:
        self.taken += 1
        self.asked.append((name, argument))
        if self.interrupt_after is not None and self.taken > self.interrupt_after:
            raise KeyboardInterrupt
        seconds = self.step_seconds / (4 if name.startswith("stoker") else 1)
        value: Any = None
        if isinstance(argument, tuple) and isinstance(argument[1], Cores):
            seconds *= 8 / argument[1].threads
        elif isinstance(argument, tuple):
            value = {"gloo": 0.05, "ccl": 0.01}
        if name == "host_turn":
            value = {"stock": 0.01, "stoker": 0.002}
        if name == "loads":
            value = {"bf16_units": self.bf16_units}
        return Taken(seconds, 1.0, 5, 4 << 30, value)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, recorded_root: Callable[[str], Path]) -> World:
    world = World(asked=[])

    class Fake:
        cpu_seconds = 0.0

        def __init__(self, build: functools.partial[Any], method: str) -> None:
            name = getattr(build, "func", build).__name__
            kinds = [word for word in getattr(build, "args", ()) if str(word).startswith(("stock", "stoker"))]
            self.name = kinds[0] if kinds else name
            world.started += 1

        def wait_until_built(self, timeout: float) -> None:
            if self.name == world.fails:
                raise SideFailed("RuntimeError: no luck")

        def take(self, argument: Any, timeout: float | None = None) -> Taken:
            return world.answer(self.name, argument)

        def begin(self, argument: Any) -> None:
            self.asked = argument

        def end(self, timeout: float) -> Taken:
            return world.answer(self.name, self.asked)

        def close(self, patience: float) -> None:
            world.closed += 1

    @contextlib.contextmanager
    def processes() -> Iterator[tuple[str, Callable[[], str]]]:
        yield "spawn", lambda: "the log"

    machine = replace(Machine.read(recorded_root("avx2_vm")))
    monkeypatch.setattr(bench_run, "Side", Fake)
    monkeypatch.setattr(bench_run, "_processes", processes)
    monkeypatch.setattr(Machine, "read", classmethod(lambda kind, root="/": machine))
    monkeypatch.setattr(bench_run.Bench, "free_memory", staticmethod(lambda: 1 << 40))
    monkeypatch.setattr(bench_run.load, "current_load", lambda: None)
    return world


def run(stages: list[str] | None = None, budget: Budget | None = None) -> tuple[Results, str]:
    stream = io.StringIO()
    short = replace(QUICK, seconds=SHORT, rounds=(2, 3))  # of sides that answer in microseconds
    return bench_run.run(stages or list(STAGES), budget or short, stream), stream.getvalue()


def test_every_stage_has_figures_and_every_side_is_ended(world: World) -> None:
    results, lines = run()
    assert [(pair.case, pair.precision, pair.rival) for pair in results.measured_steps] == [
        (case, precision, rival)
        for case in ("bert-qa", "embeddings", "lora")
        for precision, rival in (("fp32", "stock"), ("bf16", "stock bf16"))
    ]
    assert {round(pair.faster, 2) for pair in results.measured_steps} == {4.0}
    assert [pair.threads for pair in results.measured_sweep] == [1, 4]
    assert [one.bytes for one in results.allreduce] == [100_000_000, 4096]
    assert len(results.host) == 2
    assert world.started == world.closed > 10
    assert results.notes == []
    assert [line.split("]")[0] for line in lines.splitlines() if line.startswith("[")] == [
        f"[{n}/6" for n in range(1, 7)
    ]
    assert "left)" in lines


def test_sides_take_their_steps_in_turn_on_the_same_batches(world: World) -> None:
    run(["bert-qa"])
    timed = world.asked[-8:]
    assert [name for name, _ in timed[:4]] == ["stock", "stoker", "stock bf16", "stoker bf16"]
    last = timed[-1][1]
    assert [number for _, number in timed] == [last - 1] * 4 + [last] * 4


def test_without_bf16_units_stock_takes_part_in_fp32_only(world: World) -> None:
    world.bf16_units = False
    results, _ = run(["bert-qa"])
    assert [pair.rival for pair in results.measured_steps] == ["stock", "stock"]
    assert {name for name, _ in world.asked} == {"loads", "stock", "stoker", "stoker bf16"}
    assert "bf16*" in markdown(results)


def test_ctrl_c_keeps_what_was_measured(world: World) -> None:
    world.interrupt_after = 40
    saved: list[int] = []
    stream = io.StringIO()
    short = replace(QUICK, seconds=SHORT, rounds=(2, 3))  # of sides that answer in microseconds
    results = bench_run.run(list(STAGES), short, stream, lambda found: saved.append(len(found.measured_steps)))
    assert results.interrupted
    assert len(results.measured_steps) >= 2
    assert results.allreduce == []
    assert saved[0] >= 2  # after each stage, and at the end
    assert world.started == world.closed
    assert "Interrupted" in markdown(results)


def test_ctrl_c_keeps_host_times(world: World) -> None:
    world.interrupt_after = 7
    results, _ = run(["host"])
    assert results.interrupted
    assert len(results.host[0].seconds["stock"]) == 7 - 1 - 3  # without the look at torch, and the warm-up
    assert results.to_dict()["host_time"][0]["stoker_to_stock"] == 0.2


def test_ctrl_c_writes_the_files_and_exits_with_130(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    world.interrupt_after = 25
    monkeypatch.setattr(bench_stages, "QUICK", replace(QUICK, seconds=SHORT))
    assert main(["bench", "--quick", "--out", str(tmp_path / "new")]) == 130
    found = json.loads((tmp_path / "new" / "bench.json").read_text())
    assert found["interrupted"]
    assert found["steps"]
    captured = capsys.readouterr()
    assert captured.out == (tmp_path / "new" / "bench.md").read_text()
    assert "bench.json" in captured.err
    assert (tmp_path / "new" / "bench.png").exists()


def test_a_case_that_does_not_fit_is_one_line(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_run.Bench, "free_memory", staticmethod(lambda: 1 << 30))
    results, lines = run(["bert-qa", "threads", "host"])
    assert results.steps == results.sweep == []
    assert len(results.host) == 2
    assert [note.split(" ", 1)[0] for note in results.notes] == ["BERT-base", "1"]
    assert "GB of memory, and 1.1 GB are free." in results.notes[0]
    assert results.notes[0] in lines


def test_where_four_models_do_not_fit_there_are_two_at_a_time(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    case = bench_run.CASES["bert-qa"]
    two = case.need("stock", "full") + case.need("stoker", "full")
    monkeypatch.setattr(bench_run.Bench, "free_memory", staticmethod(lambda: 1.2 * two))
    results, _ = run(["bert-qa"], replace(FULL, seconds=SHORT, rounds=(1, 1)))
    assert [pair.precision for pair in results.measured_steps] == ["fp32", "bf16"]
    assert [name for name, _ in world.asked[-2:]] == ["stock bf16", "stoker bf16"]
    assert results.notes == []


def test_a_side_that_fails_is_a_note_with_a_log_and_the_rest_goes_on(world: World) -> None:
    world.fails = "stoker bf16"
    results, _ = run(["bert-qa", "host"])
    assert results.measured_steps == []
    assert results.notes == ["BERT-base QA, stock against Stoker failed: RuntimeError: no luck"]
    assert results.log == "the log"
    assert len(results.host) == 2
    assert world.started == world.closed


def test_an_installation_that_does_not_work_is_one_sentence(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world.fails = "loads"
    assert main(["bench", "--out", str(tmp_path)]) == 2
    written = capsys.readouterr().err
    assert written == "stoker bench cannot measure here: RuntimeError: no luck; `stoker selftest` says more\n"


def test_numbers_of_threads_that_would_take_too_long_are_left_out(world: World) -> None:
    world.step_seconds = 100.0
    results, _ = run(["threads"])
    assert [pair.threads for pair in results.measured_sweep] == [4]
    assert results.notes[0].startswith("Left out of 4 threads: 1. A measurement would take ")


def test_other_programs_are_noticed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_run.load, "others_during", lambda own, cpus: lambda: Load(2.0, 0.0, 4))
    monkeypatch.setattr(bench_run.load, "current_load", lambda: Load(2.0, 0.0, 4))
    results, lines = run()
    assert "Other programs keep 2.0 of 4 CPUs busy" in lines
    figures = results.to_dict()
    for table in ("steps", "host_time", "threads", "allreduce"):
        assert figures[table]
        assert all(one["disturbed"] for one in figures[table])


def test_a_fast_machine_takes_more_steps_but_not_endlessly(world: World) -> None:
    world.step_seconds = 0.001
    results, _ = run(["bert-qa"], replace(QUICK, seconds=dict.fromkeys(STAGES, 5.0)))
    assert len(results.steps[0].stock.seconds) == QUICK.rounds[1]


def test_a_slow_machine_is_not_held_up_by_the_least_number_of_rounds(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter(range(10**6))
    monkeypatch.setattr(bench_run.time, "monotonic", lambda: 3.0 * next(now))
    results, _ = run(["bert-qa"], replace(QUICK, seconds=dict.fromkeys(STAGES, 1.0), rounds=(30, 40)))
    assert len(results.steps[0].stock.seconds) == 1


def test_the_time_left_follows_the_speed_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(bench_stages.time, "monotonic", lambda: now)
    stream = io.StringIO()
    progress = Progress(list(STAGES), FULL, stream)
    progress.begin("bert-qa")
    first = stream.getvalue()
    now = 10.0
    progress.end("done")
    progress.begin("embeddings")
    assert "(about 8 min left)" in first
    assert "about 2 min left" in stream.getvalue()


@pytest.mark.parametrize(
    ("most", "quick", "counts"),
    [(112, False, [112, 64, 32, 16, 8, 4, 2, 1]), (8, False, [8, 4, 2, 1]), (112, True, [112, 1]), (1, False, [1])],
)
def test_thread_counts_are_powers_of_two_and_all(most: int, quick: bool, counts: list[int]) -> None:
    assert bench_run.thread_counts(most, quick) == counts


def test_a_rank_has_a_numa_node_or_half_of_the_only_one(recorded: Callable[[str], Machine]) -> None:
    assert [len(cpus) for cpus in bench_run.rank_cores(recorded("sapphire_rapids_8"))] == [28] * 8
    assert [len(cpus) for cpus in bench_run.rank_cores(recorded("avx2_vm"))] == [2, 2]


def test_threads_fill_one_numa_node_before_the_next(recorded: Callable[[str], Machine]) -> None:
    machine = recorded("sapphire_rapids_4")
    cores = bench_run._ordered_cores(machine)
    nodes = {cpu.number: cpu.node for cpu in machine.cpus}
    assert [nodes[cpu] for cpu in cores] == sorted(nodes[cpu] for cpu in cores)
    assert len(cores) == 112
    assert bench_run._ordered_cores(recorded("container")) == ()  # a quota: bound to nothing


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--case", "gpt5"], ["gpt5", "bert-qa"]),
        (["--quik"], ["unknown option --quik", "did you mean --quick?"]),
        (["--out", ""], ["the name is empty"]),
        (["--out", __file__], ["it is a file"]),
        (["--out", "/proc/no/such"], ["/proc/no/such", "choose another place"]),
        (["extra"], ["extra"]),
    ],
)
def test_a_wrong_option_is_one_sentence(argv: list[str], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    for word in words:
        assert word in captured.err


@pytest.mark.part("docs")
def test_tiny_models_are_measured_on_this_machine(tmp_path: Path) -> None:
    code = (
        "import sys, json; from dataclasses import replace; from stoker.bench import bench_run, bench_stages\n"
        "tiny = replace(bench_stages.QUICK, size='tiny', rounds=(1, 2), seconds=dict.fromkeys(bench_stages.STAGES, 0.1))\n"
        "print(json.dumps(bench_run.run(list(bench_stages.STAGES), tiny, sys.stderr).to_dict(), allow_nan=False))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert not [note for note in found["notes"] if "failed" in note], found["notes"]
    assert [one["case"] for one in found["steps"]] == ["bert-qa"] * 2 + ["embeddings"] * 2 + ["lora"] * 2
    assert len(found["host_time"]) == 2
    for one in found["steps"]:
        stock, stoker = one["stock"]["losses"], one["stoker"]["losses"]
        if one["case"] == "bert-qa":  # stock's softmax counts the padding
            assert stock[0] > stoker[0]
        else:  # random weights, the same seed and data, but dropout of its own on each side
            assert stock[0] == pytest.approx(stoker[0], rel=0.15)
