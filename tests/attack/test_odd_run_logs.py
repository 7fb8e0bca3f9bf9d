"""`stoker report` makes a page from any log, or prints one sentence with the reason; texts of the log are escaped."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from markupsafe import Markup

from attack.case import seed_of_tests
from attack.run_logs import GOOD, MARKUP, not_a_file, variants
from parts import rest_in
from stoker.cli import main
from stoker.hf.checkpointing.restart import _is_the_same_run as is_the_same_run
from stoker.run_report import page
from stoker.run_report.log import NAME, Run, RunLog, read_run
from stoker.run_report.page import render

SEED = seed_of_tests()


class Elements(HTMLParser):
    """The names of all elements, and of those attributes that could run code or load something."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found.add(tag)
        self.found |= {name for name, _ in attributes if name.startswith("on") or name in {"src", "action", "srcdoc"}}


def elements(text: str) -> set[str]:
    parser = Elements()
    parser.feed(text)
    return parser.found


def write_good(folder: Path) -> Path:
    log = RunLog(folder)
    for line in GOOD:
        log.write(**line)
    return folder


def fields(entries: list[dict[str, Any]], *names: str) -> list[list[Any]]:
    return [[one.get(name) for name in names] for one in entries]


READS: dict[str, Callable[[Run], Any]] = {
    "scores_plot": lambda run: (fields(run.evaluations, "step", "eval_f1", "eval_accuracy"), run.resumed_at),
    "loss_plot": lambda run: (fields(run.steps, "step", "loss", "learning_rate"), run.resumed_at),
    "throughput_plot": lambda run: (fields(run.steps, "step", "tokens_per_second", "share_of_peak"), run.resumed_at),
    "lengths_plot": lambda run: run.others.get("lengths"),
    "phases_plot": lambda run: fields(run.steps, "phases"),
    "waits_plot": lambda run: fields(run.waits, "rows"),
    "speed_plot": lambda run: run.others.get("speed", {}).get("sides"),
}


def drawn_once(
    draw: Callable[[Run], str | None], reads: Callable[[Run], Any], usual: set[str]
) -> Callable[[Run], Markup | None]:
    """Draws and checks a plot only if it differs from earlier ones; the page gets an empty plot."""
    drawn: set[str] = set()

    def stand_in(run: Run) -> Markup | None:
        key = repr(reads(run))
        if key not in drawn:
            drawn.add(key)
            assert elements(draw(run) or "") <= usual
        return Markup("<svg></svg>")

    return stand_in


@pytest.fixture
def _each_plot_once(monkeypatch: pytest.MonkeyPatch, usual: set[str]) -> None:
    """Drawing takes most of the time, and most variants differ in something that no plot shows."""
    for name, reads in READS.items():
        monkeypatch.setattr(page, name, drawn_once(getattr(page, name), reads, usual))


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    run = read_run(write_good(tmp_path_factory.mktemp("good")))
    assert run.bad_lines == 0, "the generator's own lines are good ones"
    return elements(render(run)) | {"details", "p"}


@pytest.mark.filterwarnings("error")
@pytest.mark.usefixtures("_each_plot_once")
@pytest.mark.parametrize("every", rest_in("attack", [10, 1]))
def test_any_log_gives_a_page_without_markup_from_the_log(every: int, tree_path: Path, usual: set[str]) -> None:
    """`every`: only one log of so many."""
    seen: set[str] = set()
    count = bad = 0
    for name, folder in itertools.islice(variants(SEED, tree_path, more=20), SEED % every, None, every):
        count += 1
        try:
            run = read_run(folder)
        except OSError:
            continue
        bad += bool(run.bad_lines)
        assert is_the_same_run(folder / NAME, {1}, {2}) is False, "what a launcher looks up in a log"
        content = repr((run.start, run.steps, run.evaluations, run.waits, run.others, run.resumed_at))
        if content in seen:  # the invalid part was left out
            continue
        seen.add(content)
        try:
            strange = elements(render(run)) - usual
        except Exception as error:
            raise AssertionError(f"no page could be made of a log ({name}, seed {SEED})") from error
        assert not strange, f"{name}, seed {SEED}: {strange}"
    assert count > 2000 / every
    assert bad > 1000 / every, "odd values are found when the log is read, not when the page is made"


def test_a_log_that_is_not_a_regular_file_is_refused_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, make in not_a_file().items():
        if name == "not readable" and os.geteuid() == 0:
            continue
        folder = tmp_path / name
        folder.mkdir()
        make(folder / NAME)
        assert main(["report", str(folder)]) == 2, name
        printed = capsys.readouterr().err
        assert len(printed.splitlines()) == 1, printed
        assert "run.jsonl" in printed
        assert not list(folder.glob(".*")), "nothing half written stays"


def test_an_entry_whose_step_is_text_is_skipped_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_good(tmp_path)
    RunLog(tmp_path).write("step", step=MARKUP)
    RunLog(tmp_path).write("start", resumed_at=[], arguments={MARKUP: MARKUP})
    assert main(["report", str(tmp_path)]) == 0
    text = (tmp_path / "report.html").read_text()
    sentence = f"2 of {len(GOOD) + 2} lines are damaged and skipped."
    assert sentence in text
    assert sentence in capsys.readouterr().err
    assert "<script" not in text


def test_markup_in_a_step_is_not_on_the_page_of_an_unfinished_run(tmp_path: Path, usual: set[str]) -> None:
    """The page of such a run names its last step."""
    log = RunLog(tmp_path)
    log.write("start", task="qa")
    log.write("trained", step=2)
    log.write("step", step=MARKUP)
    text = render(read_run(tmp_path))
    assert "last seen at step 0" in text
    assert elements(text) <= usual


def test_texts_of_the_log_are_escaped_on_the_page(tmp_path: Path, usual: set[str]) -> None:
    """Every text of the log that a page shows, all at once."""
    log = RunLog(tmp_path)
    machine = {"cpu": MARKUP, "system": MARKUP}
    log.write(
        "start", title=MARKUP, command=MARKUP, versions={MARKUP: MARKUP}, arguments={MARKUP: [MARKUP]}, machine=machine
    )
    log.write("model", type=MARKUP, name=MARKUP)
    log.write("applied", parts=[[MARKUP] * 3], left_alone=[[MARKUP] * 2], settings={MARKUP: MARKUP})
    row = {"answer": MARKUP, "expected": [MARKUP], "right": False}
    log.write(
        "examples",
        rows=[{**row, "question": MARKUP, "context": MARKUP, "begin": 3, "end": 9}, {**row, "texts": [MARKUP]}],
    )
    log.write("speed", sides={MARKUP: [1.0], "<b>": [2.0]}, note=MARKUP)
    log.write("end", reason=MARKUP)
    run = read_run(tmp_path)
    assert run.bad_lines == 0
    assert elements(render(run)) <= usual
