"""Whether `stoker train` may go on from a checkpoint in its folder: if it belongs to the same run, and something is left.

The same run has the same task, data, model and settings, as far as they change what is computed. Every checkpoint stores these
beside the other facts of its run; files and models are compared by their contents, so that they may be moved.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stoker.hf.checkpointing import run_facts
from stoker.hf.checkpointing.run_facts import Facts
from stoker.kernels.frozen_parameter import FrozenWeight
from stoker.option_effects import changes_result
from stoker.run_report.log import plain, read_run

__all__ = ["digest_of", "is_complete", "origin_facts", "settings_of", "why_not_continued"]

_COMPARED_ELSEWHERE = {
    "model_name_or_path", "model_revision",  # by the weights
    "train_file",  # by its contents
    "per_device_train_batch_size", "per_gpu_train_batch_size", "gradient_accumulation_steps", "tokens_per_batch",  # by step
    "warmup_ratio", "group_by_length",  # former names: they have set others
}  # fmt: skip
_BATCH = ("batch size", "gradient accumulation", "tokens per batch", "processes", "threads")
"""Facts in the section "run" that are compared as a product, or change the rounding only."""
_PARAMETERS, _VALUES = 16, 4
"""How many parameters of a model are read, and how many values of each."""
_OTHER_MODEL = 0.25
"""The share of these values that must differ in another model. The new head of a model is a small part of it."""
_TOLERANCE = 1e-4  # of values that another CPU may round differently
_WHOLE, _BLOCKS, _BLOCK, _PART = 64 << 20, 64, 1 << 20, 4096
"""More data than this is compared by its size and so many blocks; of more files than that, a part of each is read."""
_SHOWN = 6


def origin_facts(task: str, options: Iterable[Any], model: nn.Module, files: Sequence[str | Path]) -> Facts:
    """What `stoker train` adds to the facts of its checkpoints. `options` are dataclasses, `model` is not trained yet."""
    kept = {name: value for name, value in settings_of(options).items() if name not in _COMPARED_ELSEWHERE}
    origin = {"task": task, "weights": _sampled_weights(model), "training data": digest_of(files)}
    return {"settings": kept, "origin": {name: value for name, value in origin.items() if value}}


def settings_of(options: Iterable[Any]) -> dict[str, Any]:
    """The values of all options that change the result, given or not. `options` are dataclasses."""
    values = {one.name: getattr(group, one.name, None) for group in options for one in dataclasses.fields(group)}
    if (values.get("max_steps") or 0) > 0:
        values.pop("num_train_epochs", None)  # which it overrides
    return {
        name: _as_json(value) for name, value in values.items() if changes_result(name) and not name.startswith("_")
    }


def why_not_continued(checkpoint: Path, now: Facts, args: Any, *, requested: bool) -> str | None:
    """Why a run with the facts `now` must not go on from `checkpoint`; None if it may.

    `requested`: the user has named the checkpoint, so that other settings are intended.
    """
    before, folder = run_facts.read(checkpoint), checkpoint.parent
    found = _differences(before, now)
    if found and not requested:
        more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        return (
            f"{checkpoint} belongs to another run ({'; '.join(found[:_SHOWN])}{more}), so nothing was trained and nothing "
            f"written; {_ways_on(folder)}"
        )
    at_end = _is_at_end(checkpoint, args)
    complete = is_complete(folder)
    if at_end and (complete or found or not before):
        longer = "raise --max_steps or --num_train_epochs, or: " if requested else ""
        return f"{checkpoint} leaves no step to train, so nothing was written; {longer}{_ways_on(folder)}"
    if complete and not requested:  # early stopping
        return f"the run in {folder} is complete, so nothing was written; {_ways_on(folder)}"
    return None


def is_complete(folder: Path) -> bool:
    """Whether the run in `folder` has done everything that it was asked for, by its log."""
    try:
        return read_run(folder).complete
    except OSError:
        return False


def _ways_on(folder: Path) -> str:
    return f"give --overwrite_output_dir to start over in {folder}, or another --output_dir to keep it"


def _is_at_end(checkpoint: Path, args: Any) -> bool:
    state = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    if args.max_steps > 0:
        return bool(state["global_step"] >= args.max_steps)
    epoch = state.get("epoch")
    return isinstance(epoch, int | float) and epoch >= args.num_train_epochs - 1e-6


def _differences(before: Facts, now: Facts) -> list[str]:
    """One phrase for each. Facts that only one side has are not compared: another version of Stoker may have written it."""
    origins = before.get("origin", {}), now.get("origin", {})
    tasks = [{name: value for name, value in one.items() if name == "task"} for one in origins]
    found = _changed(tasks[0], tasks[1], "{}")
    found += _model_differences(before, now) + _data_differences(before, now)
    if "settings" in before and "settings" in now:
        found += _changed(before["settings"], now["settings"], "--{}")
    else:
        runs = [
            {name: value for name, value in one.get("run", {}).items() if name not in _BATCH} for one in (before, now)
        ]
        found += _changed(runs[0], runs[1], "{}")
    batches = [_examples_per_step(one.get("run", {})) for one in (before, now)]
    if None not in batches and batches[0] != batches[1]:
        found.append(f"a step had {batches[0]}, has {batches[1]}")
    return found


def _changed(before: Mapping[str, Any], now: Mapping[str, Any], form: str) -> list[str]:
    return [
        f"{form.format(name)} was {_shown(before[name])}, is {_shown(value)}"
        for name, value in now.items()
        if name in before and before[name] != value
    ]


def _shown(value: Any) -> str:
    return "not given" if value is None else str(value)


def _model_differences(before: Facts, now: Facts) -> list[str]:
    old, new = before.get("model", {}), now.get("model", {})
    if old.get("shapes", new.get("shapes")) != new.get("shapes"):
        names = [name for name in new if name != "shapes"]
        named = _changed(old, {name: new[name] for name in names}, "the model's {}")
        return named or ["the model's parameters have other shapes"]
    stored = _changed(old, {"frozen weights": new.get("frozen weights")}, "the form of {}")
    weights = [one.get("origin", {}).get("weights") for one in (before, now)]
    return [*stored, *(["the model had other weights before training"] if _are_others(*weights) else [])]


def _are_others(before: Any, now: Any) -> bool:
    """Whether two samples of weights are from different models."""
    if not isinstance(before, list) or not isinstance(now, list) or len(before) != len(now) or not now:
        return False
    differing = sum(
        not (isinstance(one, int | float) and math.isclose(one, other, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE**2))
        for one, other in zip(before, now, strict=True)
    )
    return differing > _OTHER_MODEL * len(now)


def _data_differences(before: Facts, now: Facts) -> list[str]:
    old, new = before.get("data", {}), now.get("data", {})
    if rows := _changed(old, {"rows": new["rows"]} if "rows" in new else {}, "the number of training {}"):
        return rows
    files = [one.get("origin", {}).get("training data") for one in (before, now)]
    samples = [one.get("sample") for one in (old, new)]
    other = any(None not in pair and pair[0] != pair[1] for pair in (files, samples))
    return ["the training data has other contents"] if other else []


def _examples_per_step(run: Mapping[str, Any]) -> str | None:
    tokens = run.get("tokens per batch")
    sizes = [tokens or run.get("batch size"), run.get("gradient accumulation"), run.get("processes")]
    if not all(isinstance(size, int) for size in sizes):
        return None
    return f"{math.prod(size for size in sizes if size):,} {'tokens' if tokens else 'examples'}"


def _as_json(value: Any) -> Any:
    """A setting as it is read back from a checkpoint."""
    value = plain(getattr(value, "value", value))
    if isinstance(value, Mapping):
        return {str(name): _as_json(one) for name, one in value.items()}
    return value


def _sampled_weights(model: nn.Module) -> list[float]:
    """A few values of some parameters, by which two models of the same shape are told apart."""
    parameters = [p for _, p in sorted(model.named_parameters()) if p.numel() and p.is_floating_point()]
    parameters = [
        p for p in parameters if not (isinstance(p, FrozenWeight) and p.numel() > 1 << 24)
    ]  # widened to be read
    found: list[float] = []
    for parameter in _spread(parameters, _PARAMETERS):
        with torch.no_grad():
            flat = parameter.detach().reshape(-1)
            found += [float(flat[index]) for index in _spread(range(len(flat)), _VALUES)]
    return [value if math.isfinite(value) else 0.0 for value in found]


def _spread(items: Sequence[Any], most: int) -> list[Any]:
    """At most so many of them, from the first to the last."""
    if len(items) <= most:
        return list(items)
    if most == 1:
        return [items[len(items) // 2]]
    return [items[number * (len(items) - 1) // (most - 1)] for number in range(most)]


def digest_of(files: Sequence[str | Path]) -> str | None:
    """A hash of the contents of files; None if one of them cannot be read twice."""
    digest = hashlib.sha256()
    try:
        found = [os.stat(file) for file in files]
        if not files or not all(stat.S_ISREG(one.st_mode) for one in found):
            return None  # a pipe has been read, and opening it would wait for a writer
        whole = sum(one.st_size for one in found) <= _WHOLE
        block = _BLOCK if whole or len(files) <= _BLOCKS else _PART
        for file, one in zip(files, found, strict=True):
            starts = range(0, one.st_size, block)
            digest.update(str(one.st_size).encode())
            with open(file, "rb") as opened:
                for begin in _spread(starts, len(starts) if whole else max(_BLOCKS // len(files), 1)):
                    opened.seek(begin)
                    digest.update(opened.read(block))
    except OSError:
        return None
    return digest.hexdigest()[:32]
