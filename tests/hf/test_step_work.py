"""What the Trainer does in each step outside of the model: reads, searches and walks, counted."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import stoker
from hf.tiny import TinyData, pad, tiny_model
from stoker.hf import meter as meter_module
from stoker.hf.meter import Meter, Work


def _trainer(folder: Path, kind: type[Any] = stoker.Trainer, steps: int = 6) -> Any:
    arguments = transformers.TrainingArguments(
        str(folder), max_steps=steps, per_device_train_batch_size=4, logging_steps=3, save_strategy="no", report_to="none",
        disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    return kind(tiny_model(dropout=0.0), arguments, train_dataset=TinyData(), data_collator=pad)


def test_tokens_are_read_when_they_are_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []
    count = Meter._count
    monkeypatch.setattr(Meter, "_count", lambda self: counted.append(len(self._lengths)) or count(self))
    meter = Meter(Work(per_token=1.0, per_pair=1.0, per_label=2.0), peak=None)
    labels = torch.tensor([[1, -100, 2], [3, -100, -100]])
    batch = {"input_ids": labels, "attention_mask": torch.tensor([[1, 1, 1], [1, 1, 0]]), "labels": labels}
    for _ in range(5):
        meter.batch(batch)
    assert not counted
    assert (meter.tokens, meter.rows) == (25, 10)
    assert meter.flops == 5 * (5 + 13 + 2 * 3)
    meter.take()
    assert (meter.tokens, meter.flops, meter.rows) == (0, 0.0, 0)


def test_lengths_do_not_pile_up_if_nothing_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meter_module, "_KEPT", 3)
    meter = Meter(Work(1.0, 0.0), peak=None)
    for _ in range(10):
        meter.batch({"input_ids": torch.ones(2, 3, dtype=torch.long)})
        assert len(meter._lengths) <= 4
    assert meter.tokens == 60


def test_a_step_neither_searches_for_packages_nor_counts_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = _trainer(tmp_path)
    searched: list[int] = []
    counted: list[int] = []
    find, parameters = importlib.util.find_spec, trainer.model.num_parameters

    def searching(name: str, package: str | None = None) -> Any:
        searched.append(trainer.state.global_step)
        return find(name, package)

    def counting(*args: Any, **named: Any) -> Any:
        counted.append(trainer.state.global_step)
        return parameters(*args, **named)

    monkeypatch.setattr(importlib.util, "find_spec", searching)
    trainer.model.num_parameters = counting
    trainer.train()
    assert not [step for step in searched if step > 0]
    assert not [step for step in counted if 0 < step < 6]


def test_operations_and_results_are_those_of_transformers(tmp_path: Path) -> None:
    stock, own = _trainer(tmp_path / "stock", transformers.Trainer), _trainer(tmp_path / "own")
    expected, actual = stock.train(), own.train()
    assert own.state.total_flos == stock.state.total_flos > 0
    assert actual.training_loss == pytest.approx(expected.training_loss, rel=1e-4)
    assert own.lr_scheduler.get_last_lr() == stock.lr_scheduler.get_last_lr()


def test_a_model_that_counts_its_operations_itself_is_asked(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path)

    class Own(type(trainer.model)):  # type: ignore[misc]
        def floating_point_ops(self, inputs: dict[str, Any]) -> int:
            return 7

    trainer.model.__class__ = Own
    expected = transformers.Trainer.floating_point_ops(trainer, {"input_ids": torch.ones(2, 3)})
    trainer._meter = Meter(Work(1.0, 0.0), peak=None)
    trainer._flos_per_position = 123
    assert trainer.floating_point_ops({"input_ids": torch.ones(2, 3)}) == expected
