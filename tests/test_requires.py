"""The table of private names: complete, true of the installed libraries, and obeyed where a library differs from it."""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import os
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stoker
from stoker import requires
from stoker.errors import UserError

SOURCE = Path(stoker.__file__).parent
TEXTS = {path: path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py") if path.name != "requires.py"}
LISTED = {name for part in requires.PARTS.values() for need in part.needs for name in re.findall(r"\w+", need)}
HOLDERS = {"_ActionsContainer"}  # classes that the table names only to say where an attribute is set
DOCUMENTED = {"os._exit", "library._name", "library._handle"}
"""Names with an underscore that Python's own documentation describes."""


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    """The answers are cached; tests before and after these must not share them."""
    caches = requires.missing, requires.supported
    for one in caches:
        one.cache_clear()
    yield
    for one in caches:
        one.cache_clear()


@pytest.mark.parametrize("part", requires.PARTS)
def test_the_installed_libraries_have_what_each_part_needs(part: str) -> None:
    assert requires.missing(part) == ()


def test_a_compiled_model_changes_nothing() -> None:
    """torch.compile wraps methods of nn.Module for the whole process."""
    torch.compile(nn.Linear(2, 2), backend="eager")(torch.ones(1, 2))
    assert requires.missing("optimize") == ()


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _own_names(tree: ast.AST) -> Iterator[str]:
    """Everything that Stoker itself defines: functions, classes, variables, parameters, attributes of `self` and `cls`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _owner(node) in ("self", "cls"):
            yield node.attr


def _owner(node: ast.Attribute) -> str:
    return ast.unparse(node.value)


def _private_uses(tree: ast.AST, own: set[str]) -> Iterator[tuple[int, str]]:
    """Private names of other libraries, with their lines."""
    for node in ast.walk(tree):
        found = ""
        if isinstance(node, ast.Attribute) and f"{_owner(node)}.{node.attr}" not in DOCUMENTED:
            found = node.attr if node.attr not in own or _owner(node) == "super()" else ""
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr"):
            second = node.args[1]
            if isinstance(second, ast.Constant) and second.value not in own:
                found = str(second.value)
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("stoker"):
            for name in [*(node.module or "").split("."), *(alias.name for alias in node.names)]:
                if _is_private(name):
                    yield node.lineno, name
        if _is_private(found):
            yield node.lineno, found


def test_every_private_name_in_the_source_is_listed() -> None:
    trees = {path: ast.parse(text) for path, text in TEXTS.items()}
    own = {name for tree in trees.values() for name in _own_names(tree)}
    unlisted = [
        f"{path.relative_to(SOURCE)}:{line}: {name}"
        for path, tree in trees.items()
        for line, name in _private_uses(tree, own)
        if name not in LISTED
    ]
    assert unlisted == [], "list these in src/stoker/requires.py, or use a public name"


def test_every_listed_private_name_is_used() -> None:
    everything = "\n".join(TEXTS.values())
    assert [
        name for name in sorted(filter(_is_private, LISTED - HOLDERS)) if not re.search(rf"\b{name}\b", everything)
    ] == []


def _stoker_classes() -> Iterator[type]:
    for module in pkgutil.walk_packages(stoker.__path__, "stoker."):
        if not module.name.endswith("__main__"):
            for _, cls in inspect.getmembers(importlib.import_module(module.name), inspect.isclass):
                if cls.__module__ == module.name:
                    yield cls


def test_every_method_that_overrides_a_private_one_or_one_of_the_trainer_is_listed() -> None:
    import accelerate
    import transformers

    followed = (transformers.Trainer, transformers.TrainingArguments, accelerate.Accelerator)
    unlisted = set()
    for cls in _stoker_classes():
        base = next(base for base in cls.__mro__ if not base.__module__.startswith("stoker"))
        for name, value in vars(cls).items():
            inherited = base is not object and hasattr(base, name) and inspect.isfunction(value)
            if inherited and not name.startswith("__") and (_is_private(name) or base in followed):
                unlisted |= {f"{cls.__qualname__}.{name}"} if name not in LISTED else set()
    assert unlisted == set()


# What a library that has changed leads to


def test_without_a_name_of_torch_models_stay_as_they_are(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(torch._C, "_len_torch_dispatch_stack")
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    optimizer = torch.optim.AdamW(model.parameters())
    with caplog.at_level("WARNING", "stoker"):
        for _ in range(2):
            stoker.optimize(model, optimizer)
    assert [type(module) for module in model] == [nn.Linear, nn.LayerNorm]
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    (line,) = caplog.messages
    assert line.startswith("models are not optimised, because torch 2.")
    assert "has no _len_torch_dispatch_stack; install torch==" in line


def test_only_rank_0_logs_it(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delattr(torch._C, "_len_torch_dispatch_stack")
    monkeypatch.setenv("RANK", "1")
    assert not requires.supported("optimize")
    assert caplog.messages == []


def test_without_a_name_of_an_optimizer_it_is_not_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Adam(torch.optim.Adam):
        def __init__(self, params: Any, lr: float = 1e-3) -> None: ...

    monkeypatch.setattr(torch.optim, "Adam", Adam)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stoker.optimize(model, optimizer)
    assert not optimizer.defaults["fused"]
    stoker.restore(model)


@pytest.mark.parametrize(
    ("change", "fits"),
    [
        (lambda self, action, arg_string: None, True),
        (lambda self, arg_string, action: None, False),
        (lambda self, action, arg_string, *, more=None: None, False),
        (lambda self, action: None, False),
        (None, False),
    ],
)
def test_parameters_are_compared_by_name_and_order(change: Any, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(argparse.ArgumentParser, "_get_value", change)
    assert requires.supported("option values") is fits


def test_a_part_that_cannot_be_left_out_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import accelerate

    monkeypatch.setattr(accelerate.Accelerator, "prepare_model", lambda self, model: model)
    from stoker.hf.ranks import without_ddp

    with pytest.raises(
        UserError, match=r"local SGD cannot be used, because accelerate .* has no Accelerator.prepare_model"
    ):
        without_ddp(accelerate.Accelerator(cpu=True))


TRAIN = """
import inspect, json, sys
sys.path.insert(0, {tests!r})
import transformers
from tiny import TinyData, pad, tiny_model
stock = transformers.Trainer._save_checkpoint
def _save_checkpoint(self, model, trial, metrics=None):
    return stock(self, model, trial)
transformers.Trainer._save_checkpoint = _save_checkpoint

def train(of, *again):
    args = transformers.TrainingArguments({folder!r}, max_steps=4, save_steps=2, logging_steps=1, save_total_limit=1, seed=3,
                                          use_cpu=True, report_to=[], disable_tqdm=True)
    data = TinyData()
    trainer = of(tiny_model(dropout=0.0), args, train_dataset=data, data_collator=pad)
    trainer.train(*again)
    return trainer

losses = lambda trainer: [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
before = losses(train(transformers.Trainer))
from stoker import Trainer
from stoker.errors import UserError
from stoker.model.class_swap import Optimized
trainer = train(Trainer)
try:
    train(Trainer, True)
except UserError as error:
    refused = str(error)
print(json.dumps({{
    "close": max(abs(a - b) for a, b in zip(before, losses(trainer), strict=True)), "refused": refused,
    "optimised": any(isinstance(module, Optimized) for module in trainer.model.modules()),
}}))
"""


def test_with_another_trainer_training_goes_on_as_in_transformers_and_resuming_is_refused(tmp_path: Path) -> None:
    import json

    code = TRAIN.format(tests=str(Path(__file__).parent / "hf"), folder=str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, "RANK": "0"},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    reason = "has no Trainer._save_checkpoint(model, trial); install transformers=="
    assert done.stderr.count(reason) == 1, done.stderr
    assert reason in found["refused"]
    assert found["close"] < 1e-3
    assert found["optimised"]
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-4"]
    assert not list(tmp_path.rglob("stoker*"))
