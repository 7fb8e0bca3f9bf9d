"""Shows the progress of a run: a bar in a terminal, plain lines in a log file and in a notebook."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.table import Column
from rich.text import Text
from transformers import TrainerCallback
from transformers.trainer_callback import PrinterCallback, ProgressCallback

__all__ = ["Display", "bars_in_terminals_only", "figures_of", "use_display"]

_EVERY = 10.0  # seconds between lines about an evaluation in a log file


_SHORTEST_BAR = 8
"""Columns of a bar, and what follows it loses its less important figures first."""
_BETWEEN = "  "


def figures_of(logs: dict[str, Any]) -> list[str]:
    """The figures of one log entry, the most important first."""
    parts = []
    if "loss" in logs:
        parts.append(f"loss {float(logs['loss']):.3f}")
    if "tokens_per_second" in logs:
        parts.append(f"{float(logs['tokens_per_second']):,.0f} tokens/s")
    if "learning_rate" in logs:
        parts.append(f"lr {float(logs['learning_rate']):.2e}")
    if logs.get("padding_avoided"):
        parts.append(f"padding avoided {float(logs['padding_avoided']):.0%}")
    if logs.get("share_of_peak"):
        parts.append(f"{float(logs['share_of_peak']):.0%} of peak")
    return parts


class _Figures(ProgressColumn):
    """Step and time left, and as many of the other figures as the terminal has room for."""

    max_refresh = 0.5  # seconds; the time left would flicker

    def __init__(self, console: Console) -> None:
        super().__init__(Column(no_wrap=True))
        self._console = console

    def render(self, task: Task) -> Text:
        left = "-:--" if task.time_remaining is None else _clock(task.time_remaining)
        shown = f"{task.completed:.0f}/{task.total or 0:.0f}{_BETWEEN}{left} left"
        room = (
            self._console.width - len(task.description) - _SHORTEST_BAR - 3
        )  # spaces between columns, and one at the end
        for figure in task.fields["figures"]:
            longer = f"{shown}{_BETWEEN}{figure}"
            if len(longer) > room:
                break
            shown = longer
        return Text(shown)


class Display(TrainerCallback):  # type: ignore[misc]
    """Replaces transformers' own progress bars and printed logs. Without `lines`, there is only the bar in a terminal."""

    def __init__(self, stream: Any = None, *, title: str = "train", lines: bool = True) -> None:
        self.title, self.lines = title, lines
        self.console = Console(file=stream or sys.stderr, highlight=False, markup=False, soft_wrap=True)
        self.bar: Progress | None = None
        self.training: TaskID | None = None
        self.evaluation: TaskID | None = None
        self._began = self._last_line = time.monotonic()
        self._begin_step = 0
        self._predicted = 0
        self._in_training = False

    @property
    def _terminal(self) -> bool:
        # `!stoker train` in a notebook has a terminal too, whose control characters the page does not understand.
        return self.console.is_terminal and not in_notebook()

    def _start_bar(self) -> Progress:
        if self.bar is None:
            self.bar = Progress(
                TextColumn("{task.description}", table_column=Column(no_wrap=True)),
                BarColumn(bar_width=None),
                _Figures(self.console),
                expand=True,
                console=self.console,
                transient=True,
            )
            self.bar.start()
        return self.bar

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()
        self.bar = self.training = self.evaluation = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self._began, self._begin_step = time.monotonic(), state.global_step
        self._in_training = True
        if state.is_world_process_zero and self._terminal:
            bar = self._start_bar()
            self.training = bar.add_task(self.title, total=state.max_steps, completed=state.global_step, figures=[])

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        if self.bar is not None and self.training is not None:
            self.bar.update(self.training, completed=state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **rest: Any) -> None:
        if not state.is_world_process_zero or not logs or "loss" not in logs:
            return
        figures = figures_of(logs)
        if self.bar is not None and self.training is not None:
            self.bar.update(self.training, figures=figures)
            return
        if not self.lines:
            return
        done = max(state.global_step - self._begin_step, 1)
        left = (time.monotonic() - self._began) / done * (state.max_steps - state.global_step)
        self.console.print(
            _BETWEEN.join([f"step {state.global_step}/{state.max_steps}", f"{_clock(left)} left", *figures])
        )

    def on_prediction_step(self, args: Any, state: Any, control: Any, eval_dataloader: Any = None, **rest: Any) -> None:
        if not state.is_world_process_zero or not hasattr(eval_dataloader, "__len__"):
            return
        self._predicted += 1
        if self._terminal:
            bar = self._start_bar()
            if self.evaluation is None:
                self.evaluation = bar.add_task("evaluate", total=len(eval_dataloader), figures=[])
            bar.advance(self.evaluation)
        elif self.lines and time.monotonic() - self._last_line > _EVERY:
            self._last_line = time.monotonic()
            self.console.print(f"evaluating {self._predicted}/{len(eval_dataloader)}")

    def _prediction_done(self) -> None:
        self._predicted = 0
        if self.bar is not None and self.evaluation is not None:
            self.bar.remove_task(self.evaluation)
            self.evaluation = None
            if self.training is None:
                self.close()

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **rest: Any) -> None:
        self._prediction_done()
        if state.is_world_process_zero and metrics and self._in_training and self.lines:
            scores = "  ".join(f"{name} {value:.4g}" for name, value in _scores(metrics).items())
            (self.bar.console if self.bar else self.console).print(f"evaluation at step {state.global_step}:  {scores}")

    def on_predict(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self._prediction_done()

    def on_train_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self._in_training = False
        self.close()


def in_notebook() -> bool:
    """Whether a kernel of Jupyter, or a command that one runs, is executing this."""
    return "JPY_PARENT_PID" in os.environ


def use_display(trainer: Any, stream: Any = None) -> None:
    """Installs `Display` in place of transformers' callbacks."""
    for callback in (ProgressCallback, PrinterCallback):
        trainer.remove_callback(callback)
    trainer.add_callback(Display(stream))


@contextlib.contextmanager
def bars_in_terminals_only() -> Iterator[None]:
    """Keeps the progress bars of libraries, for which they have no option, out of log files."""
    from tqdm.std import tqdm

    start = tqdm.__init__

    def init(self: Any, *args: Any, **named: Any) -> None:
        start(self, *args, **{**named, "disable": named.get("disable") or not sys.stderr.isatty()})

    tqdm.__init__ = init
    try:
        yield
    finally:
        tqdm.__init__ = start


def _scores(metrics: dict[str, Any]) -> dict[str, float]:
    hidden = ("runtime", "per_second", "total", "thresh", "preparation", "epoch")
    return {
        name.removeprefix("eval_"): float(value)
        for name, value in metrics.items()
        if isinstance(value, int | float) and not any(word in name for word in hidden)
    }


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
