"""The Trainer optimises, logs its figures, explains errors, and never loses a good checkpoint."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from hf import tiny
from stoker.errors import UserError
from stoker.hf.checkpointing import command, folders
from stoker.hf.meter import Meter, Work, training_flops
from stoker.hf.trainer import NonFiniteLoss
from stoker.run_report.log import read_run


def names(folder: Path) -> list[str]:
    return [path.name for path in folders.all_checkpoints(folder)]


def test_a_run_logs_its_figures_and_saves_in_the_layout_of_transformers(tree_path: Path) -> None:
    trainer = tiny.trainer(tree_path, max_steps=6, save_steps=3)
    trainer.train()
    entry = trainer.state.log_history[0]
    assert entry["tokens_per_second"] > 0
    assert 0 <= entry["padding_avoided"] < 1
    assert names(tree_path) == ["checkpoint-3", "checkpoint-6"]
    assert transformers.trainer_utils.get_last_checkpoint(str(tree_path)) == str(tree_path / "checkpoint-6")
    run = read_run(tree_path)
    assert run.finished
    assert len(run.steps) == 6
    assert any("padding-free" in part for part, *_ in run.others["applied"]["parts"])
    assert set(run.steps[-1]["phases"]) == {"data", "forward", "backward", "optimizer", "rest"}


def test_evaluation_without_padding_gives_the_loss_of_the_stock_model(tree_path: Path) -> None:
    model = tiny.tiny_model(dropout=0.0)
    stock = transformers.Trainer(
        tiny.tiny_model(dropout=0.0),
        transformers.TrainingArguments(str(tree_path / "stock"), use_cpu=True, report_to="none", disable_tqdm=True),
        data_collator=tiny.pad, eval_dataset=tiny.TinyData(),
    )  # fmt: skip
    ours = tiny.trainer(tree_path, model=model)
    assert ours.evaluate()["eval_loss"] == pytest.approx(stock.evaluate()["eval_loss"], rel=1e-4)
    from stoker.model import report

    assert report(model).applied


def test_use_ipex_false_trains_the_stock_model(tree_path: Path) -> None:
    trainer = tiny.trainer(tree_path, max_steps=1, save_strategy="no", use_ipex=False, logging_steps=1)
    trainer.train()
    assert "tokens_per_second" in trainer.state.log_history[0]
    assert "padding_avoided" not in trainer.state.log_history[0]  # stock computes it
    assert type(trainer.model.bert) is transformers.BertModel


def test_the_saved_model_is_stock(tree_path: Path) -> None:
    trainer = tiny.trainer(tree_path, max_steps=1, save_strategy="no")
    trainer.train()
    trainer.save_model()
    config = json.loads((tree_path / "config.json").read_text())
    assert config["architectures"] == ["BertForSequenceClassification"]
    loaded = transformers.BertForSequenceClassification.from_pretrained(tree_path)
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)
    assert not list(tree_path.glob(".*"))


class Poisoned(tiny.TinyData):
    """One row makes the loss infinite."""

    def __init__(self, bad: int) -> None:
        super().__init__(32)
        self.bad = bad

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**super().__getitem__(index), "labels": float("nan") if index == self.bad else 0.5}


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_nan_loss_stops_and_names_step_and_examples(tree_path: Path, accumulation: int) -> None:
    model = tiny.tiny_model(labels=1)
    model.config.problem_type = "regression"
    settings = {"gradient_accumulation_steps": accumulation, "save_steps": 1, "num_train_epochs": 3}
    trainer = tiny.trainer(tree_path, model=model, data=Poisoned(bad=20), **settings)
    with pytest.raises(NonFiniteLoss) as stop:
        trainer.train()
    step = trainer.state.global_step + 1
    assert f"the loss is nan at step {step}" in str(stop.value)
    assert "row-20" in str(stop.value)
    assert str(stop.value).count("row-") == 4
    good = folders.last_good(tree_path)
    assert good == tree_path / f"checkpoint-{step - 1}"
    assert f"the last good checkpoint is {good}" in str(stop.value)
    weights = transformers.BertForSequenceClassification.from_pretrained(good).state_dict()
    assert all(torch.isfinite(value).all() for value in weights.values())


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self) -> Any:
        return iter([{**row, "labels": float("nan")} for row in tiny.TinyData(16).rows])


def test_a_nan_loss_of_an_iterable_dataset_is_reported_without_examples(tree_path: Path) -> None:
    model = tiny.tiny_model(labels=1)
    model.config.problem_type = "regression"
    with pytest.raises(NonFiniteLoss, match="the loss is nan at step 1;"):
        tiny.trainer(tree_path, model=model, data=Stream(), max_steps=3).train()


def test_a_nan_loss_names_the_examples_of_a_run_resumed_with_ignore_data_skip(tree_path: Path) -> None:
    def trainer(bad: int, **settings: Any) -> Any:
        model = tiny.tiny_model(labels=1)
        model.config.problem_type = "regression"
        return tiny.trainer(tree_path, model=model, data=Poisoned(bad), num_train_epochs=3, **settings)

    trainer(bad=-1, max_steps=3, save_steps=3).train()
    resumed = trainer(bad=13, ignore_data_skip=True)
    with pytest.raises(NonFiniteLoss, match="row-13"):
        resumed.train(resume_from_checkpoint=True)


@pytest.mark.parametrize(
    ("settings", "warning"),
    [
        (
            {"tokens_per_batch": 90, "dataloader_drop_last": True},
            "dataloader_drop_last is ignored with tokens_per",
        ),
        ({"group_by_length": True, "dataloader_drop_last": True}, "dataloader_drop_last is ignored with group_by"),
        ({"tokens_per_batch": 90, "max_steps": 1}, "tokens_per_batch is ignored: an IterableDataset"),
        ({"tokens_per_batch": 90}, ""),
    ],
)
def test_an_ignored_setting_gives_a_warning(
    tree_path: Path, settings: dict[str, Any], warning: str, caplog: pytest.LogCaptureFixture
) -> None:
    data = Stream() if warning.startswith("tokens") else None
    with caplog.at_level("WARNING", logger="stoker"):
        tiny.trainer(tree_path, data=data, **settings).get_train_dataloader()
    assert caplog.text.count("is ignored") == (1 if warning else 0)
    assert warning in caplog.text


def test_a_checkpoint_that_cannot_be_pushed_gives_a_warning(
    tree_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(self: Any, folder: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(transformers.Trainer, "_push_from_checkpoint", full)
    monkeypatch.setattr(transformers.Trainer, "init_hf_repo", lambda self, **named: None)
    trainer = tiny.trainer(tree_path, max_steps=2, save_steps=2, push_to_hub=True)
    with caplog.at_level("WARNING", logger="stoker"):
        trainer.train()
    assert names(tree_path) == ["checkpoint-2"]
    assert caplog.text.count("checkpoint-2 was not pushed to the hub: [Errno 28] No space left on device;") == 1


def test_resuming_a_finished_run_trains_no_further_step(tree_path: Path) -> None:
    tiny.trainer(tree_path, max_steps=5, save_steps=5).train()
    again = tiny.trainer(tree_path, max_steps=5, save_steps=5)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 5


class SpoilLastStep(transformers.TrainerCallback):
    """The last optimizer step makes a weight infinite, which no loss sees any more."""

    def on_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **rest: Any) -> None:
        if state.global_step == state.max_steps - 1:
            with torch.no_grad():
                model.classifier.bias[0] = float("inf")


@pytest.mark.parametrize("stop_on_nan", [True, False])
def test_weights_that_are_no_longer_finite_are_not_saved(tree_path: Path, stop_on_nan: bool) -> None:
    trainer = tiny.trainer(tree_path, max_steps=4, save_steps=2, stop_on_nan=stop_on_nan)
    trainer.add_callback(SpoilLastStep())
    with pytest.raises(NonFiniteLoss, match="the weights are no longer finite after step 4;"):
        trainer.train()
    assert names(tree_path) == ["checkpoint-2"]


def test_non_finite_weights_of_the_last_step_end_a_run_that_saves_no_checkpoints(tree_path: Path) -> None:
    trainer = tiny.trainer(tree_path, max_steps=2, save_strategy="no")
    trainer.add_callback(SpoilLastStep())
    with pytest.raises(NonFiniteLoss, match=r"no longer finite after step 2; .*try a lower --learning_rate"):
        trainer.train()
    assert not read_run(tree_path).finished


@pytest.mark.parametrize("call", ["save_model", "save_model to a folder", "push_to_hub"])
def test_no_call_of_the_trainer_saves_non_finite_weights_as_the_model(tree_path: Path, call: str) -> None:
    trainer = tiny.trainer(tree_path, max_steps=1, save_strategy="no", stop_on_nan=False)
    trainer.add_callback(SpoilLastStep())
    trainer.train()
    trainer.hub_model_id = "someone/model"
    calls = {
        "save_model": trainer.save_model,
        "save_model to a folder": lambda: trainer.save_model(str(tree_path / "elsewhere")),
        "push_to_hub": trainer.push_to_hub,  # saves first, so no hub is asked
    }
    with pytest.raises(NonFiniteLoss, match="the weights are no longer finite"):
        calls[call]()
    assert not list(tree_path.rglob("*.safetensors"))


def test_large_finite_weights_are_saved_although_their_sum_overflows(tree_path: Path) -> None:
    trainer = tiny.trainer(tree_path)
    with torch.no_grad():
        trainer.model.classifier.weight.fill_(3e38)
    trainer.save_model()
    assert (tree_path / "model.safetensors").exists()


def test_a_full_disk_is_a_user_error_and_keeps_earlier_checkpoints(
    tree_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = tiny.trainer(tree_path, max_steps=4, save_steps=2)
    original = os.fsync

    def full(handle: int) -> None:
        if trainer.state.global_step == 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        original(handle)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        UserError, match=r"the disk of .* is full .*checkpoint-4 could not be written; .*checkpoint-2 is the"
    ):
        trainer.train()
    assert names(tree_path) == ["checkpoint-2"]
    assert not list(tree_path.glob(".checkpoint*"))


@pytest.mark.root
@pytest.mark.mounts
def test_a_full_tmpfs_is_a_user_error(tmp_path: Path) -> None:
    import subprocess

    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=900k", "tmpfs", str(disk)], check=True)
    try:
        with pytest.raises(UserError, match="is full"):
            tiny.trainer(disk / "out", max_steps=9, save_steps=1).train()
        good = folders.last_good(disk / "out")
        assert good is not None
        assert not list((disk / "out").glob(".checkpoint*"))
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_save_total_limit_keeps_the_newest_and_the_best(tree_path: Path) -> None:
    trainer = tiny.trainer(
        tree_path, max_steps=8, save_steps=2, eval_strategy="steps", eval_steps=2, save_total_limit=1,
        load_best_model_at_end=True, metric_for_best_model="eval_loss", learning_rate=0.0,
    )  # fmt: skip
    trainer.train()  # at a learning rate of 0 the first evaluation stays the best
    assert names(tree_path) == ["checkpoint-2", "checkpoint-8"]
    state = json.loads((tree_path / "checkpoint-8" / "trainer_state.json").read_text())
    assert state["best_model_checkpoint"] == str(tree_path / "checkpoint-2")


def test_old_checkpoints_in_a_used_folder_do_not_displace_new_ones(tree_path: Path) -> None:
    tiny.trainer(tree_path, max_steps=9, save_steps=9).train()
    tiny.trainer(tree_path, max_steps=4, save_steps=2, save_total_limit=1).train()
    assert names(tree_path) == ["checkpoint-4"]


def test_resuming_with_changed_settings_names_the_changes(tree_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiny.trainer(tree_path, max_steps=4, save_steps=2).train()
    with caplog.at_level("WARNING", logger="stoker"):
        other = tiny.TinyData(40, seed=5)
        trainer = tiny.trainer(tree_path, data=other, max_steps=5, per_device_train_batch_size=8)
        trainer.train(resume_from_checkpoint=True)
    assert "batch size was 4, is 8" in caplog.text
    assert "rows was 64, is 40" in caplog.text
    assert "steps was 4, is 5" in caplog.text


def test_resuming_another_model_is_refused_and_the_differences_named(tree_path: Path) -> None:
    tiny.trainer(tree_path, max_steps=2, save_steps=2).train()
    with pytest.raises(UserError, match=r"belongs to another model .*num_labels was 2, is 3"):
        tiny.trainer(tree_path, model=tiny.tiny_model(labels=3), max_steps=4).train(resume_from_checkpoint=True)


def test_a_broken_checkpoint_is_skipped_for_the_last_good_one(
    tree_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiny.trainer(tree_path, max_steps=4, save_steps=2).train()
    (tree_path / "checkpoint-4" / "trainer_state.json").write_text("{")
    with caplog.at_level("WARNING", logger="stoker"):
        assert folders.last_good(tree_path) == tree_path / "checkpoint-2"
    assert (
        "checkpoint-4 is skipped because it cannot be resumed from: its trainer_state.json cannot be read"
        in caplog.text
    )
    with pytest.raises(UserError, match="cannot be resumed from"):
        tiny.trainer(tree_path, max_steps=4).train(resume_from_checkpoint=str(tree_path / "checkpoint-4"))


def test_an_interrupt_during_evaluation_saves_at_once(tree_path: Path) -> None:
    trainer = tiny.trainer(tree_path, max_steps=6, save_steps=100, eval_strategy="steps", eval_steps=2)

    class Press(transformers.TrainerCallback):
        def on_prediction_step(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            trainer._interrupts.received = 15

    trainer.callback_handler.callbacks.insert(0, Press())
    with pytest.raises(SystemExit) as stop:
        trainer.train()
    assert stop.value.code == 143
    assert names(tree_path) == ["checkpoint-2"]


def test_the_resume_command_of_another_launchers_ranks_says_how_to_start_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "launches", [])
    for launch, shown in (
        (None, "To resume (start 2 processes as before):\n  stoker train qa --resume_from_checkpoint c"),
        (command.Launch(("stoker", "launch", "s.py"), outer="Intel MPI"),
         "To resume (start 2 processes by Intel MPI as before):\n  stoker launch s.py train qa --resume"),
        (command.Launch(("stoker", "launch", "-n", "2", "s.py")), "To resume:\n  stoker launch -n 2 s.py train qa --resume"),
    ):  # fmt: skip
        if launch is not None:
            command.launched_as(launch)
        assert shown in command.how_to_resume(Path("c"), ["train", "qa"], 2)
    command.launched_as(command.Launch(("stoker",), prints_command=True))
    assert command.how_to_resume(Path("c"), ["train", "qa"], 2) == ""


def test_work_counts_products_and_attention() -> None:
    model = tiny.tiny_model()
    work = Work.of(model)
    linear = 2 * (4 * 32 * 32 + 2 * 32 * 64) + 32 * 32 + 32 * 2  # layers, pooler, classifier
    assert work.per_token == 6 * linear
    assert work.per_pair == 12 * 2 * 32
    assert training_flops(work, torch.tensor([3, 5])) == work.per_token * 8 + work.per_pair * 34


BATCH = {"input_ids": torch.ones(2, 8, dtype=torch.long), "attention_mask": torch.ones(2, 8, dtype=torch.long)}


def test_a_peak_that_is_exceeded_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[bool] = []
    monkeypatch.setattr("stoker.hf.meter.peak_now", lambda bf16: looks.append(bf16) or 1e15)
    meter = Meter(Work(6.0, 0.0), 1e-3, bf16=True)
    for _ in range(2):
        meter.batch(BATCH)
        assert meter.take()["share_of_peak"] == pytest.approx(0.0, abs=1e-3)
    assert (looks, meter.peak) == ([True], 1e15)


def test_training_slightly_above_the_measured_peak_sets_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.hf.meter.peak_now", lambda bf16: None)
    meter = Meter(Work(6.0, 0.0), 100.0)
    assert [meter._share(rate)["share_of_peak"] for rate in (50.0, 104.0, 52.0)] == [0.5, 1.0, 0.5]
    assert meter.peak == 104.0


def test_a_peak_that_is_exceeded_again_is_discarded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("stoker.hf.meter.peak_now", lambda bf16: None)
    shares = []
    for peak in (1e15, 1e-3):
        meter = Meter(Work(6.0, 0.0), peak)
        for _ in range(2):
            meter.batch(BATCH)
            with caplog.at_level("WARNING", logger="stoker"):
                shares.append(meter.take().get("share_of_peak"))
    assert shares[:2] == [pytest.approx(0.0, abs=1e-3)] * 2
    assert shares[2:] == [None, None]
    assert caplog.text.count("doctor --fresh") == 1


def test_help_and_completion_show_the_arguments_of_transformers() -> None:
    import inspect

    import stoker

    stock = [base for base in stoker.Trainer.__mro__ if base.__module__ == "transformers.trainer"][-1]
    assert inspect.signature(stoker.Trainer) == inspect.signature(stock)
    assert "callbacks" in inspect.signature(stoker.Trainer).parameters
