"""Values that an optimizer or a schedule refuses are found before a training reads data or deletes checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.cli import main
from stoker.tasks.option_parser import OptionParser
from stoker.tasks.qa.fine_tune import QaOptions
from stoker.tasks.training_options import check_optimizer

NEEDED = ["--model_name_or_path", "m", "--output_dir"]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--optim_args", "x"], "--optim_args x"),
        (["--optim", "rmsprop", "--optim_args", "alpha=two"], "--optim rmsprop"),
        (["--lr_scheduler_kwargs", '{"speed": 1}'], "--lr_scheduler_kwargs"),
        (["--lr_scheduler_type", "cosine_with_min_lr"], "--lr_scheduler_type cosine_with_min_lr"),
    ],
)
def test_bad_optimizer_or_schedule_options_are_reported_before_anything_is_deleted(
    words: list[str], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "checkpoint-7").mkdir()
    command = ["train", "qa", *NEEDED, str(tmp_path), "--do_train", "--dataset_name", "d", "--overwrite_output_dir"]
    assert main([*command, *words]) == 2
    error = capsys.readouterr().err
    assert named in error
    assert error.splitlines()[-1].startswith("stoker: ")
    assert "Traceback" not in error
    assert (tmp_path / "checkpoint-7").exists()


@pytest.mark.parametrize(
    "words",
    [[], ["--optim", "adafactor"], ["--optim", "sgd", "--optim_args", "momentum=0.9"],
     ["--lr_scheduler_type", "cosine_with_restarts", "--lr_scheduler_kwargs", '{"num_cycles": 2}'],
     ["--lr_scheduler_type", "reduce_lr_on_plateau", "--eval_strategy", "epoch"]],
)  # fmt: skip
def test_valid_optimizers_and_schedules_are_accepted(words: list[str], tmp_path: Path) -> None:
    *_, args = OptionParser("train qa", QaOptions).read([*NEEDED, str(tmp_path), *words])
    check_optimizer(args)
