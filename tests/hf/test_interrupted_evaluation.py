"""A signal before or during an evaluation loses nothing: the resumed run evaluates first; weights are bitwise the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from hf import tiny
from parts import rest_in
from stoker.hf.checkpointing import folders


class Press(transformers.TrainerCallback):
    """Ctrl-C at the end of step `at`, or in the evaluation that follows it."""

    def __init__(self, trainer: Any, at: int, *, in_evaluation: bool) -> None:
        self.trainer, self.at, self.in_evaluation = trainer, at, in_evaluation

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        if state.global_step == self.at and not self.in_evaluation:
            self.trainer._interrupts.received = 2

    def on_prediction_step(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        if state.global_step == self.at and self.in_evaluation:
            self.trainer._interrupts.received = 2


def interrupted(folder: Path, at: int, *, in_evaluation: bool, **settings: Any) -> Any:
    trainer = tiny.trainer(folder, **settings)
    trainer.callback_handler.callbacks.insert(0, Press(trainer, at, in_evaluation=in_evaluation))
    with pytest.raises(SystemExit):
        trainer.train()
    return trainer


def same(one: Any, other: Any) -> bool:
    pairs = zip(one.model.state_dict().values(), other.model.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def evaluated(trainer: Any) -> list[tuple[int, float]]:
    return [(entry["step"], entry["eval_loss"]) for entry in trainer.state.log_history if "eval_loss" in entry]


BY_STEPS = {"max_steps": 14, "save_strategy": "no", "eval_strategy": "steps", "eval_steps": 3}
BY_EPOCHS = {"num_train_epochs": 3, "save_strategy": "epoch", "eval_strategy": "epoch"}
INTERRUPTED = [(BY_STEPS, 6), (BY_EPOCHS, 16), (BY_STEPS, 14), (BY_EPOCHS, 48)]


@pytest.mark.parametrize("in_evaluation", [False, True])
@pytest.mark.parametrize(
    ("settings", "at"), rest_in("kills", [(BY_STEPS, 6), (BY_EPOCHS, 16), (BY_STEPS, 14), (BY_EPOCHS, 48)], keep=2)
)
def test_the_resumed_run_evaluates_first_and_continues_exactly(
    tree_path: Path, settings: dict[str, Any], at: int, in_evaluation: bool
) -> None:
    whole = tiny.trainer(tree_path / "whole", **settings)
    whole.train()
    interrupted(tree_path / "cut", at, in_evaluation=in_evaluation, **settings)
    facts = tree_path / "cut" / f"checkpoint-{at}" / "stoker_run.json"
    assert json.loads(facts.read_text())["due"] == {"evaluation": True}
    resumed = tiny.trainer(tree_path / "cut", **settings)
    resumed.train(resume_from_checkpoint=True)
    assert "due" not in json.loads(facts.read_text())
    assert resumed.state.global_step == whole.state.global_step
    assert evaluated(resumed) == evaluated(whole)
    assert same(resumed, whole)


BEST: dict[str, Any] = {
    "max_steps": 9, "save_steps": 3, "eval_strategy": "steps", "eval_steps": 3, "load_best_model_at_end": True,
    "metric_for_best_model": "eval_loss", "greater_is_better": True, "learning_rate": 3e-3,
}  # fmt: skip


@pytest.mark.parametrize("at", [3, 9])
def test_the_best_model_is_that_of_an_uninterrupted_run(tree_path: Path, at: int) -> None:
    whole = tiny.trainer(tree_path / "whole", **BEST)
    whole.train()
    interrupted(tree_path / "cut", at, in_evaluation=False, **BEST)
    resumed = tiny.trainer(tree_path / "cut", **BEST)
    resumed.train(resume_from_checkpoint=True)
    assert Path(resumed.state.best_model_checkpoint).name == Path(whole.state.best_model_checkpoint).name
    assert resumed.state.best_metric == whole.state.best_metric
    assert same(resumed, whole)


@pytest.mark.parametrize(
    "settings", [{**BEST, "max_steps": 13}, {**BEST, **BY_EPOCHS, "max_steps": -1}], ids=["steps", "epochs"]
)
def test_a_run_that_stops_early_stops_at_the_same_step(tree_path: Path, settings: dict[str, Any]) -> None:
    def early(folder: str) -> Any:
        trainer = tiny.trainer(tree_path / folder, **{**settings, "greater_is_better": False, "learning_rate": 0.0})
        trainer.add_callback(transformers.EarlyStoppingCallback(1))
        return trainer

    whole = early("whole")
    whole.train()
    step = whole.state.global_step
    cut = early("cut")
    cut.args.restore_callback_states_from_checkpoint = True
    cut.callback_handler.callbacks.insert(0, Press(cut, step, in_evaluation=False))
    with pytest.raises(SystemExit):
        cut.train()
    resumed = early("cut")
    resumed.args.restore_callback_states_from_checkpoint = True
    resumed.train(resume_from_checkpoint=True)
    assert step < whole.state.max_steps
    assert resumed.state.global_step == step
    assert evaluated(resumed) == evaluated(whole)


def test_after_an_interrupt_the_same_trainer_trains_and_evaluates_again(tree_path: Path) -> None:
    trainer = tiny.trainer(tree_path, max_steps=4, save_strategy="no")
    trainer.callback_handler.callbacks.insert(0, press := Press(trainer, 2, in_evaluation=False))
    with pytest.raises(SystemExit):
        trainer.train()
    assert trainer._interrupts.received is None
    assert not trainer.is_in_train
    trainer.remove_callback(press)
    before = folders.all_checkpoints(tree_path)
    trainer.evaluate()
    assert folders.all_checkpoints(tree_path) == before
    trainer.train()
    assert trainer.state.global_step == 4
