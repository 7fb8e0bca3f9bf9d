"""What a checkpoint belongs to: model, data and the settings that decide which examples come when.

Kept as a small JSON file in each checkpoint, so that going on with something changed can say what has changed.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stoker.errors import UserError

__all__ = ["NAME", "check", "command_of_script", "facts_of", "read", "write"]

NAME = "stoker_run.json"
_ORDER = {
    "batch size": "per_device_train_batch_size",
    "gradient accumulation": "gradient_accumulation_steps",
    "tokens per batch": "tokens_per_batch",
    "sampling": "train_sampling_strategy",
    "seed": "seed",
    "data seed": "data_seed",
    "learning rate": "learning_rate",
    "scheduler": "lr_scheduler_type",
    "epochs": "num_train_epochs",
    "steps": "max_steps",
    "optimizer": "optim",
    "bf16": "bf16",
    "gradient compression": "gradient_compression",
    "local SGD": "local_sgd",
    "outer learning rate": "local_sgd_outer_lr",
    "outer momentum": "local_sgd_outer_momentum",
}


def facts_of(model: nn.Module, dataset: Any, args: Any) -> dict[str, dict[str, Any]]:
    """The facts by which two runs are compared, as JSON can hold them."""
    run = {name: getattr(args, field, None) for name, field in _ORDER.items()}
    run = {name: getattr(value, "value", value) for name, value in run.items()}
    run |= {"processes": args.world_size, "threads": torch.get_num_threads()}
    return {"model": _model_facts(model), "data": _data_facts(dataset), "run": run}


def _model_facts(model: nn.Module) -> dict[str, Any]:
    shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    digest = hashlib.sha256(json.dumps(shapes, sort_keys=True).encode()).hexdigest()[:16]
    config = getattr(model, "config", None)
    facts: dict[str, Any] = {"class": type(model).__name__, "parameters": sum(p.numel() for p in model.parameters())}
    for name in ("num_hidden_layers", "hidden_size", "vocab_size", "num_labels"):
        if (value := getattr(config, name, None)) is not None:
            facts[name] = value
    return {**facts, "shapes": digest}


def _data_facts(dataset: Any) -> dict[str, Any]:
    try:
        rows = len(dataset)
    except TypeError:
        return {}
    # Some rows stand for all: reading every one could take long, and a changed file moves these too.
    digest = hashlib.sha256()
    for index in sorted({0, rows // 3, 2 * rows // 3, rows - 1}) if rows else ():
        item = dataset[index]
        ids = item.get("input_ids") if isinstance(item, Mapping) else None
        digest.update(repr(list(map(int, ids)) if ids is not None else item).encode())
    return {"rows": rows, "sample": digest.hexdigest()[:16]}


def write(folder: Path, facts: dict[str, Any]) -> None:
    (folder / NAME).write_text(json.dumps(facts, indent=1), encoding="utf-8")


def read(folder: Path) -> dict[str, dict[str, Any]] | None:
    """The facts of a checkpoint; None if it was written by stock transformers."""
    try:
        facts = json.loads((folder / NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return facts if isinstance(facts, dict) else None


def check(checkpoint: Path, now: dict[str, dict[str, Any]]) -> list[str]:
    """What differs between a checkpoint's run and this one, in sentences; UserError if the model is another."""
    before = read(checkpoint)
    if before is None:
        return []
    model = _differences(before.get("model", {}), now["model"], hide=("shapes",))
    if before.get("model", {}).get("shapes") != now["model"]["shapes"]:
        named = "; ".join(model) or "its parameters have other shapes"
        raise UserError(
            f"{checkpoint} belongs to another model than the one given ({named}); start over or give that model"
        )
    data = _differences(before.get("data", {}), now["data"], hide=("sample",))
    if not data and before.get("data") != now["data"]:
        data = ["the training data has other rows"]
    return [*model, *data, *_differences(before.get("run", {}), now["run"])]


def _differences(before: dict[str, Any], now: dict[str, Any], hide: tuple[str, ...] = ()) -> list[str]:
    return [
        f"{name} was {before.get(name)}, is {now.get(name)}"
        for name in now
        if name not in hide and name in before and before[name] != now[name]
    ]


def command_of_script(checkpoint: Path) -> str:
    """How to go on with a script of the user's: its own command line if that can say so, else the line of Python."""
    if any(word.startswith("--output_dir") for word in sys.argv):
        # The last of a repeated option counts.
        return shlex.join([sys.executable, *sys.argv, "--resume_from_checkpoint", str(checkpoint)])
    return f'trainer.train(resume_from_checkpoint="{checkpoint}")'
