"""A training run in a process of its own, to be killed: `python killed_run.py FOLDER [KILL]`.

KILL is nothing, `step:N` (SIGKILL itself during step N), `write:N` (SIGKILL itself after N writes, fsyncs or renames of
checkpoint files) or `signal:NAME:N` (send itself a signal in step N). It resumes from whatever checkpoint is there.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch

torch.set_num_threads(1)

import tiny  # noqa: E402
from stoker.hf import checkpoints  # noqa: E402


def main() -> None:
    folder, kill = Path(sys.argv[1]), (sys.argv[2:] or [""])[0].split(":")
    settings = {"save_total_limit": 2, "save_steps": 4, "max_steps": 18, "gradient_accumulation_steps": 2}
    settings |= {"eval_strategy": "steps", "eval_steps": 6}
    if "tokens" in sys.argv[3:]:
        settings |= {"tokens_per_batch": 48}
    trainer = tiny.trainer(folder, **settings)
    if kill[0] == "write":
        _kill_after_writes(int(kill[1]))
    elif kill[0]:
        number = signal.SIGKILL if kill[0] == "step" else signal.Signals[kill[1]]
        _signal_in_step(trainer, int(kill[-1]), number)
    last = checkpoints.last_good(folder)
    trainer.train(resume_from_checkpoint=str(last) if last else None)
    torch.save(trainer.model.state_dict(), folder / "final.pt")


def _signal_in_step(trainer: object, step: int, number: int) -> None:
    original = trainer.compute_loss

    def compute_loss(*args: object, **named: object) -> object:
        if trainer.state.global_step == step and trainer.model.training:
            os.kill(os.getpid(), number)
        return original(*args, **named)

    trainer.compute_loss = compute_loss


def _kill_after_writes(count: int) -> None:
    """Counts the calls that change the disk while a checkpoint is written; dies before the count-th takes effect."""
    left = [count]

    def counted(function: object) -> object:
        def call(*args: object, **named: object) -> object:
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **named)

        return call

    torch.save = counted(torch.save)
    for name in ("fsync", "rename", "unlink", "rmdir"):
        setattr(os, name, counted(getattr(os, name)))


main()
