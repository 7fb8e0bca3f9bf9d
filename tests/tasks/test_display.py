"""The progress of a run fits into the terminal: step and time left always, the other figures where there is room."""

from __future__ import annotations

import io
import re
from types import SimpleNamespace

import pytest

from stoker.tasks.display import Display

LOGS = {
    "loss": 1.2345,
    "learning_rate": 2e-5,
    "tokens_per_second": 12345.6,
    "padding_avoided": 0.41,
    "share_of_peak": 0.8,
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("LINES", "24")
    for name in ("JPY_PARENT_PID", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    return Terminal()


def train(stream: io.StringIO) -> str:
    """What is written about a run that is at step 120 of 1,200."""
    display, state = Display(stream), SimpleNamespace(global_step=0, max_steps=1200, is_world_process_zero=True)
    display.on_train_begin(None, state, None)
    state.global_step = 120
    display.on_step_end(None, state, None)
    display.on_log(None, state, None, logs=LOGS)
    if display.bar is not None:
        display.bar.refresh()
    display.on_train_end(None, state, None)
    return stream.getvalue()


@pytest.mark.parametrize(
    ("width", "shown", "missing"),
    [
        (140, ["loss 1.234", "12,346 tokens/s", "lr 2.00e-05", "padding avoided 41%", "80% of peak"], []),
        (80, ["loss 1.234", "12,346 tokens/s"], ["padding", "peak"]),
        (60, ["loss 1.234"], ["tokens/s", "lr"]),
        (40, [], ["loss", "tokens/s"]),
    ],
)
def test_a_bar_sheds_its_less_important_figures_first(
    width: int, shown: list[str], missing: list[str], terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    frames = [
        line for line in re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", train(terminal))) if line.strip()
    ]
    last = next(line for line in reversed(frames) if "120/1200" in line)
    assert re.search(r"120/1200  \S+ left", last)
    assert [figure for figure in shown if figure not in last] == []
    assert [figure for figure in missing if figure in last] == []
    assert max(map(len, frames)) <= width


def test_a_notebook_gets_lines(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JPY_PARENT_PID", "1")
    check_lines(train(terminal))


def test_a_log_file_gets_lines() -> None:
    check_lines(train(io.StringIO()))


def check_lines(text: str) -> None:
    assert re.fullmatch(
        r"step 120/1200  \d+:\d\d left  loss 1\.234  12,346 tokens/s  lr 2\.00e-05  padding avoided 41%  80% of peak\n",
        text,
    )
