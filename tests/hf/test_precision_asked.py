"""Trainer and Accelerator compute in the precision that was asked for, on every CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

import stoker
from hf import tiny
from stoker.machine import rates
from stoker.model import precision
from stoker.model.fused_layer import FusedLayer


@pytest.fixture(autouse=True)
def _cpu_with_fast_bf16_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the machine on which a choice by speed would always be bf16."""
    monkeypatch.setattr(precision, "torch_has_bf16_units", lambda: True)
    monkeypatch.setattr(rates, "bf16_training_gain", lambda: 10.0)


@contextmanager
def types_of_layers() -> Iterator[set[torch.dtype]]:
    """The types that fused layers return within the block."""
    seen: set[torch.dtype] = set()

    def watch(module: nn.Module, args: object, output: object) -> None:
        if isinstance(module, FusedLayer):
            seen.add((output[0] if isinstance(output, tuple) else output).dtype)

    hook = register_module_forward_hook(watch)
    try:
        yield seen
    finally:
        hook.remove()


@pytest.mark.parametrize(("bf16", "expected"), [(False, torch.float32), (True, torch.bfloat16)])
def test_the_trainer_computes_in_bf16_only_with_the_flag(tree_path: Path, bf16: bool, expected: torch.dtype) -> None:
    trainer = tiny.trainer(tree_path, max_steps=1, save_strategy="no", bf16=bf16)
    with types_of_layers() as seen:
        trainer.train()
    assert seen == {expected}


@pytest.mark.parametrize(
    ("dtype", "bf16", "expected"),
    [
        (torch.bfloat16, False, torch.bfloat16),
        ("auto", False, torch.bfloat16),
        (torch.float32, True, torch.float32),
        (None, True, torch.bfloat16),
    ],
)
def test_the_trainer_keeps_the_precision_that_a_script_passed_to_optimize(
    tree_path: Path, dtype: precision.DtypeOption, bf16: bool, expected: torch.dtype
) -> None:
    model = stoker.optimize(tiny.tiny_model(), dtype=dtype)
    trainer = tiny.trainer(tree_path, model=model, max_steps=1, save_strategy="no", bf16=bf16)
    with types_of_layers() as seen:
        trainer.train()
    assert seen == {expected}
    assert trainer._precision() == expected, "what the share of the peak is computed for"


def test_each_trainer_of_a_model_uses_the_precision_of_its_own_flag(tree_path: Path) -> None:
    model, asked = tiny.tiny_model(), []
    for bf16 in (True, False):
        trainer = tiny.trainer(tree_path / str(bf16), model=model, max_steps=1, save_strategy="no", bf16=bf16)
        trainer.train()
        asked.append({module.stoker_settings.dtype for module in model.modules() if isinstance(module, FusedLayer)})
    assert asked == [{torch.bfloat16}, {None}]


def test_the_trainer_follows_the_mixed_precision_of_a_launch(tree_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    trainer = tiny.trainer(tree_path, max_steps=1, save_strategy="no")
    with types_of_layers() as seen:
        trainer.train()
    AcceleratorState._reset_state(reset_partial_state=True)
    assert seen == {torch.bfloat16}


@pytest.mark.parametrize(
    ("mixed_precision", "autocast", "expected"),
    [("no", False, torch.float32), ("bf16", False, torch.bfloat16), ("no", True, torch.bfloat16)],
)
def test_accelerate_computes_in_bf16_only_by_mixed_precision_or_autocast(
    mixed_precision: str, autocast: bool, expected: torch.dtype
) -> None:
    from accelerate.state import AcceleratorState

    from stoker.hf.accelerator import Accelerator

    AcceleratorState._reset_state(reset_partial_state=True)
    model: nn.Module = Accelerator(cpu=True, mixed_precision=mixed_precision).prepare(tiny.tiny_model())
    own = torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext()
    with types_of_layers() as seen, own:
        model(**tiny.pad(tiny.TinyData(4).rows))
    AcceleratorState._reset_state(reset_partial_state=True)
    assert seen == {expected}
