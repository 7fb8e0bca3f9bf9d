"""What each rank of a training test does: trains a small classifier with Stoker's Trainer and returns its weights."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "hf"))

GLOBAL_BATCH = 8


def train(rank: int, size: int, folder: str, changed: dict[str, Any]) -> dict[str, Any]:
    """Trains on `size` ranks with the same global batch whatever their number; rank `slow` is behind in every step."""
    import tiny
    import torch

    rows, slow = changed.pop("rows", 61), changed.pop("slow", None)
    accumulate = changed.get("gradient_accumulation_steps", 1)
    settings = {
        "per_device_train_batch_size": GLOBAL_BATCH // size // accumulate,
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "logging_steps": 5,
        "save_strategy": "no",
        "seed": 7,
    }
    resume = changed.pop("resume", None)
    settings.update(changed)
    trainer = tiny.trainer(folder, model=tiny.tiny_model(dropout=0.0), data=tiny.TinyData(rows), **settings)
    if slow is not None:
        _fall_behind(trainer, rank == slow, Path(folder))
    tokens = _count_tokens(trainer)
    trainer.train(resume_from_checkpoint=resume)
    flat = torch.cat([p.detach().reshape(-1) for p in trainer.model.parameters()]).numpy()
    return {
        "weights": flat.astype(np.float32),
        "tokens": tokens,
        "history": trainer.state.log_history,
        "compressed": trainer.ranks.compressed is not None,
        "wrapped": type(trainer.model_wrapped).__name__,
    }


def _fall_behind(trainer: Any, behind: bool, folder: Path) -> None:
    """The rank that is `behind` begins each step when the other one has all its gradients, however busy the machine is."""
    import time

    original, steps = trainer.compute_loss, itertools.count(1)
    trained = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    gradients = itertools.count(1)

    def note(parameter: Any) -> None:
        step, rest = divmod(next(gradients), len(trained))
        if not rest:
            (folder / f"gradients-{step}").touch()

    def compute_loss(*args: Any, **named: Any) -> Any:
        step = next(steps)
        while not (folder / f"gradients-{step}").exists():
            time.sleep(0.01)
        return original(*args, **named)

    if behind:
        trainer.compute_loss = compute_loss
    else:
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(note)


def _count_tokens(trainer: Any) -> list[int]:
    found: list[int] = []
    original = trainer.training_step

    def training_step(model: Any, inputs: Any, *args: Any, **named: Any) -> Any:
        found.append(int(inputs["attention_mask"].sum()))
        return original(model, inputs, *args, **named)

    trainer.training_step = training_step
    return found


def accelerate(rank: int, size: int, words: dict[str, str]) -> dict[str, Any]:
    """A loop with Accelerator(), as `stoker launch` prepares it; weights after three steps, and once all have met."""
    import os

    import tiny
    import torch

    os.environ.update(words)
    try:
        from stoker.hf.accelerator import Accelerator

        accelerator = Accelerator(cpu=True)
        model = tiny.tiny_model(dropout=0.0)
        wrapped, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.2))
        rows = tiny.TinyData(24)
        for step in range(3):
            mine = [rows[8 * step + i] for i in range(rank, 8, size)]
            wrapped(**tiny.pad(mine)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        before = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy()
        accelerator.wait_for_everyone()
        after = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy()
    finally:
        for name in words:
            del os.environ[name]
    return {"before": before, "after": after, "wrapped": type(wrapped).__name__}


def accelerate_and_resume(rank: int, size: int, folder: str, words: dict[str, str]) -> dict[str, Any]:
    """Four steps with a checkpoint after two, and again the last two from it, by an Accelerator that began with other weights."""
    import os
    import shutil

    import tiny
    import torch
    import torch.distributed as dist

    rows = tiny.TinyData(32)
    os.environ.update(words)

    def start(other: float) -> tuple[Any, Any, Any]:
        from stoker.hf.accelerator import Accelerator

        accelerator = Accelerator(cpu=True)
        model = tiny.tiny_model(dropout=0.0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += other
        return accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.2))

    def train(model: Any, optimizer: Any, steps: range) -> None:
        for step in steps:
            model(**tiny.pad([rows[8 * step + i] for i in range(rank, 8, size)])).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    def weights(model: Any) -> Any:
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy()

    try:
        accelerator, model, optimizer = start(0.0)
        train(model, optimizer, range(2))
        accelerator.wait_for_everyone()
        accelerator.save_state(folder)
        saved = weights(model)
        train(model, optimizer, range(2, 4))
        whole = weights(model)
        dist.barrier()
        accelerator, model, optimizer = start(0.1)
        accelerator.load_state(folder)
        train(model, optimizer, range(2, 4))
        resumed = weights(model)
        dist.barrier()
        plain = f"{folder}-without"
        if rank == 0:
            shutil.copytree(folder, plain, ignore=shutil.ignore_patterns("stoker_*"))
        dist.barrier()
        accelerator, model, optimizer = start(0.1)
        accelerator.load_state(plain)
        accelerator._local_sgd.average()
        without = weights(model)
    finally:
        for name in words:
            del os.environ[name]
    return {"saved": saved, "whole": whole, "resumed": resumed, "without": without}
