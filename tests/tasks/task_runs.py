"""Runs of `stoker train` for tests: their command, what they leave behind, and how one that was stopped must end."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rig import warm
from stoker.cli import main

STOPPED = """
import os, sys
from stoker.cli import main
from transformers.trainer_callback import CallbackHandler
at, number, begin = int(sys.argv[1]), int(sys.argv[2]), CallbackHandler.on_step_begin
def on_step_begin(self, args, state, control):
    if state.global_step == at:
        os.kill(os.getpid(), number)
    return begin(self, args, state, control)
CallbackHandler.on_step_begin = on_step_begin
sys.exit(main(sys.argv[3:]))
"""
"""Runs a command in which this step begins with this signal."""


def train_command(task: str, model: Path, data: Path, out: Path, *more: str) -> list[str]:
    """Two steps without examples for the report, unless `more` says otherwise."""
    return [
        "train", task, "--model_name_or_path", str(model), "--train_file", str(data), "--output_dir", str(out),
        "--max_steps", "2", "--report_to", "none", "--samples", "0", *more,
    ]  # fmt: skip


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a model or an adapter."""
    from safetensors.torch import load_file

    return load_file(next(folder.glob("*model.safetensors")))


def entries(folder: Path, kind: str) -> list[dict[str, Any]]:
    """The lines of a kind in the log of a run."""
    found = [json.loads(line) for line in (folder / "run.jsonl").read_text().splitlines()]
    return [one for one in found if one["kind"] == kind]


def in_two_ranks(argv: list[str]) -> None:
    """Runs a command under `stoker launch -n 2`."""
    words = [sys.executable, "-m", "stoker", "launch", "-n", "2", "-m", "stoker", *argv]
    done = warm.run(words, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]


def assert_resumes_exactly(
    argv: Callable[[Path], list[str]],
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    step: int = 5,
    by: signal.Signals = signal.SIGKILL,
) -> None:
    """A run that was stopped in `step` and started again ends with bitwise the weights and losses of one that was not.

    `argv` makes the command of an output folder. The two runs are left in folder/"whole" and folder/"parts".
    """
    assert main(argv(folder / "whole")) == 0
    again = argv(folder / "parts")
    done = warm.run(
        [sys.executable, "-c", STOPPED, str(step), str(int(by)), *again],
        capture_output=True, text=True, timeout=300, transformers=True,
    )  # fmt: skip
    assert done.returncode == (-by if by == signal.SIGKILL else 128 + by), done.stderr[-2000:]
    capsys.readouterr()
    assert main(again) == 0
    assert "resuming from" in capsys.readouterr().err
    whole, parts = weights(folder / "whole"), weights(folder / "parts")
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert [one["loss"] for one in entries(folder / "whole", "step")] == [
        one["loss"] for one in {one["step"]: one for one in entries(folder / "parts", "step")}.values()
    ]
