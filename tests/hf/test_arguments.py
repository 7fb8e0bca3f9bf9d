"""TrainingArguments takes every argument of transformers' and the retired ones, each with its old meaning."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

import pytest
import transformers
from transformers import HfArgumentParser

from rig import warm
from stoker.errors import UserError
from stoker.hf import arguments as module
from stoker.hf.arguments import TrainingArguments
from stoker.hf.ddp_backend import choose
from stoker.hf.retired import RETIRED


@pytest.fixture(autouse=True)
def _forget_earlier_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WARNED", set())


def parse(*words: str) -> TrainingArguments:
    (found,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(list(words))
    return found


def test_every_argument_of_transformers_is_taken_and_output_dir_comes_first() -> None:
    ours = [one.name for one in dataclasses.fields(TrainingArguments)]
    stock = [one.name for one in dataclasses.fields(transformers.TrainingArguments)]
    assert ours[: len(stock)] == stock
    assert TrainingArguments("here").output_dir == "here"


def test_the_retired_flags_of_an_ipex_command_parse_without_values() -> None:
    args = parse(
        "--output_dir", "o", "--use_ipex", "--bf16", "--no_cuda", "--overwrite_output_dir", "--group_by_length"
    )
    assert args.use_cpu
    assert args.bf16
    assert args.device.type == "cpu"
    assert args.overwrite_output_dir
    assert args.train_sampling_strategy == "group_by_length"
    assert args.optimizes


def test_each_retired_argument_keeps_its_meaning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", "before")
    args = TrainingArguments(str(tmp_path), warmup_ratio=0.1, logging_dir=str(tmp_path / "tb"), xpu_backend="gloo",
                             evaluation_strategy="steps", per_gpu_train_batch_size=3)  # fmt: skip
    assert args.get_warmup_steps(200) == 20
    assert os.environ["TENSORBOARD_LOGGING_DIR"] == str(tmp_path / "tb")
    assert args.ddp_backend == "gloo"
    assert args.eval_strategy == "steps"
    assert args.per_device_train_batch_size == 3


def test_use_ipex_false_turns_optimisation_off() -> None:
    assert not TrainingArguments("o", use_ipex=False).optimizes
    assert not parse("--output_dir", "o", "--use_ipex", "False").optimizes


def test_bf16_needs_no_use_cpu() -> None:
    assert TrainingArguments("o", bf16=True).use_cpu


def test_each_retired_argument_is_explained_once_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", logger="stoker"):
        TrainingArguments("o", use_ipex=True, no_cuda=True, ddp_backend="ccl")
        TrainingArguments("o", use_ipex=True)
    lines = [record.message for record in caplog.records]
    assert sum(line.startswith("use_ipex") for line in lines) == 1
    assert sum(line.startswith("no_cuda") for line in lines) == 1
    assert sum("ccl" in line for line in lines) <= 1  # a warning only where no such backend is installed


def test_fp16_on_a_cpu_gives_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", logger="stoker"):
        TrainingArguments("o", fp16=True)
    assert "fp16 is ignored: CPUs train in fp32; bf16 saves memory" in caplog.text


def test_a_backend_is_accepted_for_one_process() -> None:
    assert TrainingArguments("o", ddp_backend="gloo").world_size == 1


def test_a_warmup_ratio_is_a_fraction_of_the_steps_including_0_and_1() -> None:
    assert TrainingArguments("o", warmup_ratio=1.0).get_warmup_steps(100) == 100
    assert TrainingArguments("o", warmup_ratio=0.0).get_warmup_steps(100) == 0
    with pytest.raises(ValueError, match="0 to 1"):
        TrainingArguments("o", warmup_ratio=2.0)


def test_a_backend_that_is_not_for_cpus_falls_back_to_gloo_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", logger="stoker"):
        assert TrainingArguments("o", ddp_backend="nccl").ddp_backend == "gloo"
    assert choose("nccl").note in [record.message for record in caplog.records]


def test_the_table_of_retired_arguments_names_none_that_is_in_use() -> None:
    today = {one.name for one in dataclasses.fields(transformers.TrainingArguments)}
    if transformers.__version__.startswith("5"):
        assert not today & {row.name for row in RETIRED}
    assert all(row.renamed is None or row.renamed in today for row in RETIRED)


TIMEOUT = """
import torch.distributed as dist
from stoker.hf.arguments import TrainingArguments
args = TrainingArguments("o", ddp_timeout=77)
group = dist.distributed_c10d._get_default_group()
print("seconds", group._get_backend(__import__("torch").device("cpu")).options._timeout.total_seconds(), args.world_size)
"""


def test_ddp_timeout_applies_to_the_process_group(tmp_path: Path) -> None:
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": "0", "OMP_NUM_THREADS": "1"}  # fmt: skip
    command = [sys.executable, "-c", TIMEOUT]
    done = warm.run(command, env=environment, capture_output=True, text=True, timeout=200, transformers=True)
    assert "seconds 77.0 1" in done.stdout, done.stderr[-1500:]


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_infinite_and_nan_arguments_are_refused(value: float, tmp_path: Path) -> None:
    """In scripts of any kind, which read their command line by transformers' own parser."""
    numbers = [one.name for one in dataclasses.fields(TrainingArguments) if isinstance(one.default, float)]
    assert {"learning_rate", "weight_decay", "adam_epsilon", "max_grad_norm", "num_train_epochs"} <= set(numbers)
    for name in [*numbers, "warmup_ratio", "neftune_noise_alpha", "local_sgd_outer_lr"]:
        with pytest.raises(ValueError, match=rf"{name} is .*; it must be a finite number"):
            TrainingArguments(str(tmp_path), **{name: value})
    with pytest.raises(UserError, match="learning_rate is"):  # which `stoker launch` answers with its sentence alone
        parse("--output_dir", str(tmp_path), f"--learning_rate={value}")
