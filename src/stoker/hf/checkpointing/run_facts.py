"""Facts of a run that decide whether resuming continues it exactly: its model, its data, and which examples come when.

Each checkpoint stores them in a small JSON file, so that a resumed run can report what has changed.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from stoker.errors import UserError
from stoker.hf.checkpointing import random_state
from stoker.kernels.frozen_parameter import FrozenWeight

__all__ = ["NAME", "Facts", "check", "data_facts", "facts_of", "read", "require_optimizer", "write"]

Facts = dict[str, dict[str, Any]]
"""The sections "model", "data", "run", and "due" if an evaluation is still to come; each holds values by name."""

NAME = "stoker_run.json"
_RUN_ARGUMENTS = {
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
    "steps before local SGD": "local_sgd_warmup_steps",
}


def facts_of(model: nn.Module, data: dict[str, Any], args: Any) -> Facts:
    """The facts by which two runs are compared, as JSON can hold them; `data` is the result of `data_facts`."""
    run = {name: getattr(args, field, None) for name, field in _RUN_ARGUMENTS.items()}
    run = {name: getattr(value, "value", value) for name, value in run.items()}
    if (run.get("steps") or 0) > 0:
        del run["epochs"]  # which it overrides
    run |= {"processes": args.world_size, "threads": torch.get_num_threads()}
    return {"model": _model_facts(model), "data": data, "run": run}


def _model_facts(model: nn.Module) -> dict[str, Any]:
    shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    digest = hashlib.sha256(json.dumps(shapes, sort_keys=True).encode()).hexdigest()[:16]
    config = getattr(model, "config", None)
    facts: dict[str, Any] = {"class": type(model).__name__, "parameters": sum(p.numel() for p in model.parameters())}
    for name in ("num_hidden_layers", "hidden_size", "vocab_size", "num_labels"):
        if (value := getattr(config, name, None)) is not None:
            facts[name] = value
    forms = sorted({p.stored.form for p in model.parameters() if isinstance(p, FrozenWeight)})
    return {**facts, "frozen weights": ", ".join(forms) or "as loaded", "shapes": digest}


def data_facts(dataset: Any) -> dict[str, Any]:
    """Number of rows and a digest of a few of them; what cannot be read is left out, because no run depends on it."""
    try:
        rows = len(dataset)
    except (TypeError, NotImplementedError):
        return {}
    try:
        with random_state.preserved():
            # Rows that are made at random come out the same each time.
            random.seed(0)
            np.random.seed(0)
            torch.random.default_generator.manual_seed(0)
            return {"rows": rows, "sample": read_sample(dataset, rows)}
    except Exception:  # a dataset may raise anything; the training loop will hit it too, with a traceback
        return {"rows": rows}


def read_sample(dataset: Any, rows: int) -> str:
    # A few rows represent all: reading every one could take long, and a changed file changes these too.
    digest = hashlib.sha256()
    for index in sorted({0, rows // 3, 2 * rows // 3, rows - 1}) if rows else ():
        item = dataset[index]
        ids = item.get("input_ids") if isinstance(item, Mapping) else None
        # The default repr contains the memory address, which differs between processes.
        text = repr(_plain(ids)) if ids is not None else re.sub(r"\b0x[0-9a-f]+", "", repr(item))
        digest.update(text.encode())
    return digest.hexdigest()[:16]


def _plain(ids: Any) -> Any:
    """Arrays and tensors as nested lists of numbers, at any depth (one list per choice, one row per sequence)."""
    if hasattr(ids, "tolist"):
        return ids.tolist()
    return [_plain(one) for one in ids] if isinstance(ids, list | tuple) else ids


def write(folder: Path, facts: Facts) -> None:
    (folder / NAME).write_text(json.dumps(facts, indent=1), encoding="utf-8")


def read(folder: Path) -> Facts:
    """The facts of a checkpoint; empty if stock transformers wrote it, or if its file holds something else."""
    try:
        facts = json.loads((folder / NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    valid = isinstance(facts, dict) and all(isinstance(section, dict) for section in facts.values())
    return facts if valid else {}


def check(checkpoint: Path, now: Facts) -> list[str]:
    """What differs between a checkpoint's run and this one, one phrase each; UserError if the model is another one."""
    before = read(checkpoint)
    if not before:
        return []
    model = _differences(before.get("model", {}), now["model"], hide=("shapes",))
    if before.get("model", {}).get("shapes") != now["model"]["shapes"]:
        named = "; ".join(model) or "its parameters have other shapes"
        raise UserError(
            f"{checkpoint} belongs to another model than the one given ({named}); start over or give that model"
        )
    data = _differences(before.get("data", {}), now["data"], hide=("sample",))
    samples = [facts.get("sample") for facts in (before.get("data", {}), now["data"])]
    if not data and None not in samples and samples[0] != samples[1]:
        data = ["the training data has other rows"]
    return [*model, *data, *_differences(before.get("run", {}), now["run"])]


def require_optimizer(checkpoint: Path, optimizer: Any, name: str) -> None:
    """UserError if the state that `optimizer` has just loaded from `checkpoint` lacks settings that it needs.

    Otherwise the first step would fail on the settings that the state does not have.
    """
    before = read(checkpoint).get("run", {}).get("optimizer")
    needed = set(getattr(optimizer, "defaults", ()))
    if before == name or not any(needed - set(group) for group in optimizer.param_groups):
        return
    written = f"--optim {before}" if before else "another optimizer"
    again = f"give --optim {before} again" if before else "give that one"
    raise UserError(
        f"{checkpoint} was written with {written}, and --optim {name} cannot continue from its state; "
        f"{again}, or start over (--overwrite_output_dir)"
    )


def _differences(before: dict[str, Any], now: dict[str, Any], hide: tuple[str, ...] = ()) -> list[str]:
    return [
        f"{name} was {before.get(name)}, is {now.get(name)}"
        for name in now
        if name not in hide and name in before and before[name] != now[name]
    ]
