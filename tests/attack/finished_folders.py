"""The output folder of a finished run, given to a run with other settings: it is refused, and no file in it changes."""

from __future__ import annotations

import contextlib
import io
import os
import random
import shutil
from pathlib import Path

from attack.case import Case
from attack.command_lines import GOOD_FILES, flat, good_training

__all__ = ["finished_folder", "make_finished"]

_TASKS = ("classify", "sft")
# No run is longer than the finished one: that could be a request to train on.
_SETTINGS: tuple[tuple[str, ...], ...] = (
    ("--learning_rate", "1e-4"), ("--learning_rate", "0.01"), ("--seed", "7"), ("--per_device_train_batch_size", "2"),
    ("--weight_decay", "0.1"), ("--warmup_steps", "1"), ("--max_steps", "1"), ("--optim", "sgd"),
    ("--lr_scheduler_type", "cosine"), ("--gradient_accumulation_steps", "2"),
    ("--max_grad_norm", "0.5"), ("--adam_beta2", "0.9"),
)  # fmt: skip
_OF_TASK: dict[str, tuple[tuple[str, ...], ...]] = {
    "classify": (("--train_file", "other.tsv"), ("--model_name_or_path", "other"), ("--max_seq_length", "32")),
    "sft": (
        ("--train_file", "other.jsonl"),
        ("--lora_r", "2"),
        ("--max_length", "64"),
        ("--loss_on", "all"),
        ("--full",),
    ),
}


def make_finished(base: Path) -> None:
    """Trains one model for each task, in folders below `base`."""
    from stoker.cli import main

    for task in _TASKS:
        folder = base / "finished" / task
        folder.mkdir(parents=True)
        for name, target in _links(base).items():
            (folder / name).symlink_to(target)
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        os.chdir(folder)
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            code = main(_command(task, ()))
        if code != 0:
            raise RuntimeError(f"the run that is to be finished ended with {code}: {said.getvalue()[-2000:]}")


def finished_folder(r: random.Random, base: Path) -> Case:
    task = r.choice(_TASKS)
    known = _SETTINGS + _OF_TASK[task] * 2
    chosen = r.sample(known, r.choice((0, 1, 1, 1, 2)))
    suffix = "tsv" if task == "classify" else "jsonl"
    lines = (base / f"train.{suffix}").read_bytes().splitlines(keepends=True)
    files = {f"other.{suffix}": b"".join([lines[0], *lines[:0:-1]])}

    def before(folder: str) -> None:
        shutil.copytree(base / "finished" / task / "out", Path(folder) / "cwd" / "out")

    return Case(_command(task, chosen), files, _links(base), before=before, codes=(2,))


def _command(task: str, more: tuple[tuple[str, ...], ...] | list[tuple[str, ...]]) -> list[str]:
    return ["train", task, *flat(good_training(task)), "--save_steps", "1", *flat([list(one) for one in more])]


def _links(base: Path) -> dict[str, str]:
    return {
        "model": str(base / "model"),
        "other": str(base / "qa_model"),
        **{name: str(base / name) for name in GOOD_FILES},
    }
