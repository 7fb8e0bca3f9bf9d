"""The log of a run is readable after a kill at any byte, and continuous over all interruptions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from stoker.run_report.log import NAME, RunLog, read_run


def write_run(folder: Path) -> RunLog:
    log = RunLog(folder)
    log.write("start", command="stoker train qa", resumed_at=None)
    for step in range(1, 7):
        log.write("step", step=step, loss=1.0 / step, phases={"forward": 0.1})
    log.write("evaluation", step=6, eval_f1=np.float32(50.0))
    return log


def test_a_log_cut_at_any_byte_still_reads(tmp_path: Path) -> None:
    write_run(tmp_path)
    whole = (tmp_path / NAME).read_bytes()
    for end in range(0, len(whole), 7):
        (tmp_path / NAME).write_bytes(whole[:end])
        run = read_run(tmp_path)
        assert run.bad_lines <= 1
        assert [one["step"] for one in run.steps] == list(range(1, len(run.steps) + 1))
        RunLog(tmp_path).write("step", step=99, loss=0.0)
        assert read_run(tmp_path).steps[-1]["step"] == 99, "a torn line does not swallow the next"


def test_a_resumed_run_replaces_repeated_steps(tmp_path: Path) -> None:
    log = write_run(tmp_path)
    log.write("start", resumed_at=4)
    log.write("step", step=5, loss=0.7)
    log.write("end", reason="finished", step=5)
    run = read_run(tmp_path)
    assert [one["step"] for one in run.steps] == [1, 2, 3, 4, 5]
    assert run.steps[-1]["loss"] == 0.7
    assert run.evaluations == []
    assert run.resumed_at == [4]
    assert run.finished
    assert run.start["command"] == "stoker train qa"


def test_numbers_that_json_cannot_represent_become_text(tmp_path: Path) -> None:
    RunLog(tmp_path).write("step", step=1, loss=float("nan"), grad_norm=float("inf"))
    assert read_run(tmp_path).steps[0]["loss"] == "nan"


def test_a_log_that_cannot_be_written_does_not_stop_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    RunLog(tmp_path / "file").write("start")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_the_log_of_an_earlier_run_is_renamed(tmp_path: Path) -> None:
    log = write_run(tmp_path)
    log.start_over()
    assert not (tmp_path / NAME).exists()
    assert (tmp_path / (NAME + ".old")).exists()


def test_shares_refer_to_the_last_peak(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.write("start")
    log.write("step", step=1, share_of_peak=0.9, peak=100e9)
    log.write("step", step=2, peak=None)
    log.write("step", step=3, share_of_peak=0.5, peak=180e9)
    run = read_run(tmp_path)
    assert run.peak == 180e9
    assert [one.get("share_of_peak") for one in run.steps] == [pytest.approx(0.5), None, 0.5]


def test_a_share_above_one_in_an_older_log_raises_the_peak(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.write("start")
    log.write("step", step=1, share_of_peak=1.04, peak=100e9)
    log.write("step", step=2, share_of_peak=0.52, peak=100e9)
    run = read_run(tmp_path)
    assert run.peak == pytest.approx(104e9)
    assert [one["share_of_peak"] for one in run.steps] == [pytest.approx(1.0), pytest.approx(0.5)]
