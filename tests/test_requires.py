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
from importlib import metadata
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
DOCUMENTED = {"os._exit", "library._name", "library._handle"}
"""Names with an underscore that Python's own documentation describes."""
VARIABLES = {
    "config": {"PretrainedConfig"},
    "config_class": {"PretrainedConfig"},
    "Tensor": {"Tensor"},
    "gloo": {"ProcessGroupGloo"},
    "group": {"ProcessGroupGloo"},
    "inner": {"Adam", "Adagrad", "SGD"},
    "layer": {"Module"},
    "model": {"PreTrainedModel"},
    "module": {"Module"},
    "options": {"_Options"},
    "parser": {"_ActionsContainer"},
    "rendezvous": {"torch.distributed.rendezvous"},
    "sentence_class": {"SentenceTransformer"},
    "spec": {"_load_unlocked"},
    "weight": {"Tensor"},
    "trl_utils": {"trl.trainer.utils"},
    "wrapped": {"DistributedDataParallel"},
}
"""The classes of other libraries whose objects have these names in Stoker's source."""


def _listed() -> Iterator[tuple[str, str]]:
    """Each name in the table, after the module or the class that it belongs to."""
    for need in [one for part in requires.PARTS.values() for needs in part.needs for one in needs.split(" | ")]:
        parsed = requires._NEED.fullmatch(need)
        assert parsed is not None
        modules, names = parsed["module"].split("."), parsed["path"].split(".")
        yield from ((".".join(modules[:end]), modules[end]) for end in range(1, len(modules)))
        yield from zip([parsed["module"], *names], names, strict=False)
        yield from ((names[0], name) for name in requires._names(parsed["inside"] or ""))


LISTED = set(_listed())


@pytest.fixture(autouse=True)
def clear_caches() -> Iterator[None]:
    """The answers are cached; tests before and after these must not share them."""
    caches = requires.missing, requires.supported
    for one in caches:
        one.cache_clear()
    yield
    for one in caches:
        one.cache_clear()


@pytest.mark.parametrize("part", requires.PARTS)
def test_the_installed_libraries_have_what_each_part_needs(part: str) -> None:
    for_5 = (
        "attention interface",
        "TRL head",
        "sentence-transformers trainers",
        "few-shot models",
        "exported embedding models",
        "Trainer: healing",
    )
    if part in for_5 and requires.release(metadata.version("transformers")) < (5,):
        pytest.skip("not used with transformers 4")
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


def _private_uses(tree: ast.AST, own: set[str]) -> Iterator[tuple[int, str, str]]:
    """Private names of other libraries: the line, the expression before the dot (or the module), and the name."""
    for node in ast.walk(tree):
        owner = found = ""
        if isinstance(node, ast.Attribute):
            owner, found = _owner(node), node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr"):
            owner, second = ast.unparse(node.args[0]), node.args[1]
            found = str(second.value) if isinstance(second, ast.Constant) else ""
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("stoker"):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            for end, name in enumerate(names):
                if _is_private(name):
                    yield node.lineno, ".".join(names[:end]) if end < len(names) - 1 else node.module or "", name
        foreign = owner in VARIABLES or owner == "super()" or owner.partition(".")[0] in ("torch", "transformers")
        if _is_private(found) and f"{owner}.{found}" not in DOCUMENTED and (foreign or found not in own):
            yield node.lineno, owner, found


def _imported(tree: ast.AST) -> dict[str, str]:
    """The modules, and the names of other modules, that a file imports, by the names it gives them."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.asname or alias.name.partition(".")[0]: alias.asname and alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return {name: full or name for name, full in found.items()}


def _holders(owner: str, tree: ast.Module, line: int, module: str) -> set[str]:
    """The modules or classes that the expression before the dot may stand for."""
    if owner in ("self", "cls", "super()"):
        inside = [
            node
            for node in tree.body
            if isinstance(node, ast.ClassDef) and node.lineno <= line <= (node.end_lineno or 0)
        ]
        cls = getattr(importlib.import_module(module), inside[0].name)
        return {base.__name__ for base in cls.__mro__ if not base.__module__.startswith("stoker")}
    name = owner.rpartition(".")[2]
    if name == "trainer":
        return {"Trainer"}
    root, dot, rest = owner.partition(".")
    return VARIABLES.get(name, set()) | {_imported(tree).get(root, root) + dot + rest}


_NEED_TRANSFORMERS_5 = (
    "stoker.tasks.sentences.",
    "stoker.tasks.embed.",
    "stoker.tasks.rerank.",
    "stoker.tasks.fewshot.",
    "stoker.tasks.export.exported_sentences",
)
"""They import sentence-transformers, whose accepted versions do."""


def _can_be_imported(module: str) -> bool:
    old = requires.release(metadata.version("transformers")) < (5,)
    return not module.endswith("__main__") and not (old and module.startswith(_NEED_TRANSFORMERS_5))


def test_every_private_name_in_the_source_is_listed_with_its_owner() -> None:
    trees = {path: ast.parse(text) for path, text in TEXTS.items()}
    own = {name for tree in trees.values() for name in _own_names(tree)}
    unlisted = []
    for path, tree in trees.items():
        file = path.relative_to(SOURCE)
        module = ".".join(["stoker", *file.with_suffix("").parts]).removesuffix(".__init__")
        for line, owner, name in _private_uses(tree, own) if _can_be_imported(module) else ():
            if not any((holder, name) in LISTED for holder in _holders(owner, tree, line, module)):
                unlisted.append(f"{file}:{line}: {owner}.{name}")
    assert unlisted == [], "list these in src/stoker/requires.py, or use a public name"


_ONLY_SAY_WHERE = {"_ActionsContainer", "_bootstrap", "_load_unlocked"}
"""Names in the table that are not used: others are set there."""


def test_every_listed_private_name_is_used() -> None:
    everything = "\n".join(TEXTS.values())
    private = {name for _, name in LISTED if _is_private(name)} - _ONLY_SAY_WHERE
    assert [name for name in sorted(private) if not re.search(rf"\b{name}\b", everything)] == []


def _stoker_classes() -> Iterator[type]:
    for module in pkgutil.walk_packages(stoker.__path__, "stoker."):
        if _can_be_imported(module.name):
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
                listed = any((holder.__name__, name) in LISTED for holder in base.__mro__)
                unlisted |= set() if listed else {f"{cls.__qualname__}.{name}"}
    assert unlisted == set()


def test_stokers_class_in_place_of_a_librarys_hides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """`stoker launch` puts it there."""
    from stoker.hf.accelerator import Accelerator

    stock = sys.modules["accelerate.accelerator"].Accelerator
    names = {"__module__": stock.__module__, "__qualname__": stock.__qualname__}
    for ours in (Accelerator, type("Accelerator", (Accelerator,), names)):
        monkeypatch.setattr("accelerate.accelerator.Accelerator", ours)
        requires.missing.cache_clear()
        assert requires.missing("DDP settings") == ()


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


def test_a_method_of_argparse_with_other_parameters_is_not_overridden(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def _get_value(self: Any, arg_string: str, action: Any) -> str:
        return arg_string

    monkeypatch.setattr(argparse.ArgumentParser, "_get_value", _get_value)

    class Parser(argparse.ArgumentParser):
        def _get_value(self, action: Any, arg_string: str) -> str:
            raise AssertionError("called with other arguments than it takes")

    Parser.__module__ = "stoker.option_values"
    assert requires.drop_unsupported(Parser)._get_value is _get_value
    assert "options are not checked for inf, NaN" in caplog.messages[0]


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


def test_a_class_that_carries_the_name_of_the_library_is_not_taken_for_the_librarys() -> None:
    from accelerate.accelerator import Accelerator as stock

    from stoker.hf.accelerator import Accelerator

    ours = type("Accelerator", (Accelerator,), {"__module__": stock.__module__})
    assert requires._stock(ours) is requires._stock(Accelerator) is stock
