"""Runs trainings that are killed and resumed, each in a fork of this process: `python killed_runs.py FOLDER < scenarios`.

A scenario has a list of kills, one JSON object per line: "step:N" (SIGKILL during step N), "write:N" (SIGKILL before the
N-th write, fsync or rename of a checkpoint), "manifest:N" (SIGKILL with the N-th manifest half written) or "SIGTERM:N" and
"SIGINT:N" (in step N). After the last kill the run is resumed until it ends. Prints one JSON object per scenario: how each
process ended, which checkpoint each began from, a hash of the final weights, and what is left in the folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch

torch.set_num_threads(1)  # a process with running OpenMP threads cannot be forked

import tiny  # noqa: E402

import stoker.hf.trainer  # noqa: E402, F401  imported here, once, not in every fork
from stoker.hf.checkpointing import folders, manifest  # noqa: E402

SETTINGS: dict[str, Any] = {
    "save_total_limit": 2,
    "save_steps": 3,
    "max_steps": 14,
    "gradient_accumulation_steps": 2,
    "eval_strategy": "steps",
    "eval_steps": 4,
}


def main() -> None:
    home = Path(sys.argv[1])
    tiny.trainer(home / "warm-up", max_steps=1, save_strategy="no").train()
    for number, line in enumerate(sys.stdin):
        scenario = json.loads(line)
        folder = home / f"run-{number}"
        folder.mkdir()
        ends = [_fork(folder, kill, scenario.get("settings", {})) for kill in [*scenario["kills"], None]]
        final = folder / "final.txt"
        begun = (folder / "begun.txt").read_text().split()
        left = sorted(path.name for path in folder.rglob(".*"))
        weights = final.read_text() if final.exists() else None
        print("RESULT", json.dumps({"ends": ends, "begun": begun, "weights": weights, "left": left}), flush=True)


def _fork(folder: Path, kill: str | None, settings: dict[str, Any]) -> int:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            output = os.open(folder / "output.txt", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
            os.dup2(output, 1)
            os.dup2(output, 2)
            _train(folder, kill, settings)
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _train(folder: Path, kill: str | None, settings: dict[str, Any]) -> None:
    # Started in the background by a shell, this process would have inherited that Ctrl-C is ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    settings = {**SETTINGS, **settings}
    make = tiny.masked_trainer if "mask_seed" in settings else tiny.trainer
    trainer = make(folder, **settings)
    if kill is not None:
        kind, _, at = kill.partition(":")
        if kind == "write":
            _kill_before_write(int(at))
        elif kind == "manifest":
            _kill_in_manifest(int(at))
        else:
            _signal_in_step(trainer, int(at), signal.SIGKILL if kind == "step" else signal.Signals[kind])
    last = folders.last_good(folder)
    with open(folder / "begun.txt", "a") as begun:
        print(last.name if last else "start", file=begun)
    trainer.train(resume_from_checkpoint=str(last) if last else None)
    digest = hashlib.sha256()
    for name, value in sorted(trainer.model.state_dict().items()):
        digest.update(name.encode() + value.numpy().tobytes())
    (folder / "final.txt").write_text(digest.hexdigest())


def _signal_in_step(trainer: Any, step: int, number: int) -> None:
    original, sent = trainer.compute_loss, []

    def compute_loss(*args: Any, **named: Any) -> Any:
        if trainer.state.global_step == step and trainer.model.training and not sent:
            sent.append(number)
            os.kill(os.getpid(), number)
        return original(*args, **named)

    trainer.compute_loss = compute_loss


def _kill_before_write(count: int) -> None:
    """Counts the calls by which checkpoints get on the disk, and dies before the count-th of them."""
    left = [count]

    def counted(function: Any) -> Any:
        def call(*args: Any, **named: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **named)

        return call

    torch.save = counted(torch.save)
    for name in ("fsync", "rename", "replace", "unlink", "rmdir", "mkdir"):
        setattr(os, name, counted(getattr(os, name)))


def _kill_in_manifest(count: int) -> None:
    """Dies when the count-th manifest of the process is half on the disk, and not yet in its place."""
    original, left = os.replace, [count]

    def replace(source: Any, target: Any) -> None:
        if Path(target).name == manifest.NAME:
            left[0] -= 1
            if left[0] < 0:
                os.truncate(source, os.path.getsize(source) // 2)
                os.kill(os.getpid(), signal.SIGKILL)
        original(source, target)

    os.replace = replace


if __name__ == "__main__":
    main()
