"""What a checkpoint belongs to: model, data and the settings that decide which examples come when.

Kept as a small JSON file in each checkpoint, so that going on with something changed can say what has changed. And
the random numbers, which a resumed run must find where the step had left them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from stoker.errors import UserError

__all__ = [
    "NAME",
    "RandomNumbers",
    "aside",
    "check",
    "data_facts",
    "facts_of",
    "random_numbers",
    "read",
    "require_optimizer",
    "write",
]

RandomNumbers = tuple[Any, Any, torch.Tensor]

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


def random_numbers() -> RandomNumbers:
    """Where the generators stand that a checkpoint keeps: Python's, numpy's and torch's."""
    return random.getstate(), np.random.get_state(), torch.random.get_rng_state()


@contextlib.contextmanager
def aside(state: RandomNumbers | None = None) -> Iterator[None]:
    """What happens within does not move the random numbers of training; it may begin from another `state` of them."""
    before = random_numbers()
    try:
        if state is not None:
            _set(state)
        yield
    finally:
        _set(before)


def _set(state: RandomNumbers) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.random.set_rng_state(state[2])


def facts_of(model: nn.Module, data: dict[str, Any], args: Any) -> dict[str, dict[str, Any]]:
    """The facts by which two runs are compared, as JSON can hold them; those of the data are `data_facts`."""
    run = {name: getattr(args, field, None) for name, field in _ORDER.items()}
    run = {name: getattr(value, "value", value) for name, value in run.items()}
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
    return {**facts, "shapes": digest}


def data_facts(dataset: Any) -> dict[str, Any]:
    """What is known of the training data; what cannot be read is left out, for no run depends on it."""
    try:
        rows = len(dataset)
    except (TypeError, NotImplementedError):
        return {}
    try:
        with aside():
            # Rows that are made at random come out the same each time.
            random.seed(0)
            np.random.seed(0)
            torch.random.default_generator.manual_seed(0)
            return {"rows": rows, "sample": _sample(dataset, rows)}
    except (
        Exception
    ):  # whatever a data set raises; the training loop will meet it too, where it can be seen whose it is
        return {"rows": rows}


def _sample(dataset: Any, rows: int) -> str:
    # Some rows stand for all: reading every one could take long, and a changed file moves these too.
    digest = hashlib.sha256()
    for index in sorted({0, rows // 3, 2 * rows // 3, rows - 1}) if rows else ():
        item = dataset[index]
        ids = item.get("input_ids") if isinstance(item, Mapping) else None
        # Objects without words of their own name their place in memory, which is another in every process.
        words = repr(_plain(ids)) if ids is not None else re.sub(r"\b0x[0-9a-f]+", "", repr(item))
        digest.update(words.encode())
    return digest.hexdigest()[:16]


def _plain(ids: Any) -> Any:
    """Numbers and lists of them, however deep (one list per choice, one row per sequence), whatever held them."""
    if hasattr(ids, "tolist"):
        return ids.tolist()
    return [_plain(one) for one in ids] if isinstance(ids, list | tuple) else ids


def write(folder: Path, facts: dict[str, Any]) -> None:
    (folder / NAME).write_text(json.dumps(facts, indent=1), encoding="utf-8")


def read(folder: Path) -> dict[str, dict[str, Any]] | None:
    """The facts of a checkpoint; None if it was written by stock transformers, or its file holds something else."""
    try:
        facts = json.loads((folder / NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    kept = isinstance(facts, dict) and all(isinstance(part, dict) for part in facts.values())
    return facts if kept else None


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
    samples = [facts.get("sample") for facts in (before.get("data", {}), now["data"])]
    if not data and None not in samples and samples[0] != samples[1]:
        data = ["the training data has other rows"]
    return [*model, *data, *_differences(before.get("run", {}), now["run"])]


def require_optimizer(checkpoint: Path, optimizer: Any, name: str) -> None:
    """UserError if `checkpoint`, whose state `optimizer` has just loaded, was written by one with other settings.

    Otherwise the first step would fail on the settings that the state does not have.
    """
    before = (read(checkpoint) or {}).get("run", {}).get("optimizer")
    needed = set(getattr(optimizer, "defaults", ()))
    if before == name or not any(needed - set(group) for group in optimizer.param_groups):
        return
    written = f"--optim {before}" if before else "another optimizer"
    again = f"give --optim {before} again" if before else "give that one"
    raise UserError(
        f"{checkpoint} was written with {written}, and --optim {name} cannot go on from its state; "
        f"{again}, or start over (--overwrite_output_dir)"
    )


def _differences(before: dict[str, Any], now: dict[str, Any], hide: tuple[str, ...] = ()) -> list[str]:
    return [
        f"{name} was {before.get(name)}, is {now.get(name)}"
        for name in now
        if name not in hide and name in before and before[name] != now[name]
    ]
