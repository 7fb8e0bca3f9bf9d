"""The page shows which ranks waited for which; steps that a resumed run repeats count once."""

from __future__ import annotations

from pathlib import Path

from stoker.run_report.figures import waits_of
from stoker.run_report.log import RunLog, read_run
from stoker.run_report.page import write_report


def log_waits(folder: Path) -> RunLog:
    log = RunLog(folder)
    log.write("start", task="qa")
    log.write("waits", step=2, seconds=0.5, rows=[[1, 1, 0.25, 0.0], [2, 1, 0.125, 0.0]])
    log.write("waits", step=4, seconds=0.5, rows=[[3, 0, 0.0, 0.0625], [4, 1, 0.5, 0.0]])
    return log


def test_the_page_shows_which_rank_others_waited_for(tmp_path: Path) -> None:
    log_waits(tmp_path)
    text = write_report(tmp_path).read_text()
    assert "rank 0 in 1 of 4 steps, rank 1 in 3 of 4 steps" in text
    assert '<tr><td>4</td><td>rank 1</td><td class="count">500</td><td class="count">0</td></tr>' in text


def test_repeated_steps_count_once(tmp_path: Path) -> None:
    log = log_waits(tmp_path)
    log.write("start", resumed_at=2)
    log.write("waits", step=3, seconds=0.5, rows=[[3, 0, 0.0, 1.0]])
    rows, blamed = waits_of(read_run(tmp_path))
    assert [row[0] for row in rows] == [1, 2, 3]
    assert blamed == [1, 2]


def test_a_run_of_one_process_has_no_waits(tmp_path: Path) -> None:
    RunLog(tmp_path).write("start", task="qa")
    assert "waited" not in write_report(tmp_path).read_text()


def test_steps_between_averages_of_local_sgd_have_no_waits(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.write("start", task="qa")
    log.write(
        "waits", step=4, seconds=0.5, rows=[[1, 0, 0.0, 0.0], [2, 0, 0.0, 0.0], [3, 0, 0.0, 0.0], [4, 1, 0.25, 0.0]]
    )
    assert "rank 0 in 0 of 1 steps, rank 1 in 1 of 1 steps" in write_report(tmp_path).read_text()
