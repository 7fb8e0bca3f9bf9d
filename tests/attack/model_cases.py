"""Commands on the broken model folders of `model_folders.py`."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

from attack import model_folders
from attack.case import Case
from attack.command_lines import flat, good_training

__all__ = ["model_folder"]


def model_folder(r: random.Random, base: Path) -> Case:
    good = base / "qa_model"
    if r.random() < 0.6:
        _, fault = r.choice(list(model_folders.faults(good)))
    else:
        fault = model_folders.random_fault(r)

    def before(folder: str) -> None:
        model = Path(folder) / "cwd" / "model"
        shutil.copytree(good, model)
        fault(model)

    command = r.choice((
        ["ask", "--model", "model", "--text", "Ada wrote it.", "--question", "Who wrote it?"],
        ["train", "qa", *flat(good_training("qa"))],
        ["train", "qa", *flat(good_training("qa"))],
        ["train", "classify", *flat(good_training("classify"))],
        ["plan", "--model", "model", "--length", "20", "--nodes", "1,2"],
    ))  # fmt: skip
    links = {name: str(base / name) for name in ("train.json", "dev.json", "train.tsv", "dev.tsv")}
    return Case(command, links=links, before=before, writes=("out",), codes=(0, 1, 2))
