"""Secrets of a command line are not stored with the command, nor in the files saved with a model."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest

from stoker import TrainingArguments
from stoker.hf.secrets import without_secrets


@pytest.mark.parametrize(
    ("words", "shown", "dropped"),
    [
        (["--token", "x", "--do_train"], ["--token", "hidden", "--do_train"], ["--do_train"]),
        (["--hub-token=x", "a"], ["--hub-token=hidden", "a"], ["a"]),
        (["--push_to_hub_token", "x"], ["--push_to_hub_token", "hidden"], []),
        (["--use_auth_token", "--do_eval"], ["--use_auth_token", "--do_eval"], ["--do_eval"]),
        (["--extra_mpi_params=-x HF_TOKEN=x", "a"], ["--extra_mpi_params", "hidden", "a"], ["a"]),
        (["--extra-mpi-params", "hidden", "a"], ["--extra-mpi-params", "hidden", "a"], ["a"]),
        (["--extra_mpi_params=-v", "a"], ["--extra_mpi_params=-v", "a"], ["--extra_mpi_params=-v", "a"]),
        (["--tokens_per_batch", "4096"], ["--tokens_per_batch", "4096"], ["--tokens_per_batch", "4096"]),
        (["--tokenizer_name", "bert"], ["--tokenizer_name", "bert"], ["--tokenizer_name", "bert"]),
        (["train.py", "token", "--api_key", "k", "--x"], ["train.py", "token", "--api_key", "hidden", "--x"],
         ["train.py", "token", "--x"]),
        (["-genv", "HF_TOKEN=x", "s.py"], ["-genv", "HF_TOKEN=hidden", "s.py"], ["s.py"]),
        (["-genv", "WANDB_API_KEY", "x", "s.py"], ["-genv", "WANDB_API_KEY=hidden", "s.py"], ["s.py"]),
        (["--genv=AWS_SECRET_ACCESS_KEY=x=y", "s.py"], ["--genv", "AWS_SECRET_ACCESS_KEY=hidden", "s.py"], ["s.py"]),
        (["-genv", "TOKENIZERS_PARALLELISM=0", "-genv", "A", "b"], ["-genv", "TOKENIZERS_PARALLELISM=0", "-genv", "A", "b"],
         ["-genv", "TOKENIZERS_PARALLELISM=0", "-genv", "A", "b"]),
    ],
)  # fmt: skip
def test_values_of_secret_options_are_hidden_or_removed(words: list[str], shown: list[str], dropped: list[str]) -> None:
    assert without_secrets(words) == shown
    assert without_secrets(words, None) == dropped


def test_saved_arguments_contain_no_token_but_copies_do(tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), hub_token="hf_x", report_to="none")
    assert b"hf_x" not in pickle.dumps(args)
    assert pickle.loads(pickle.dumps(args)).learning_rate == args.learning_rate
    for same in (copy.copy(args), copy.deepcopy(args)):
        assert type(same) is TrainingArguments
        assert (same.hub_token, same.output_dir) == ("hf_x", args.output_dir)
    assert args.hub_token == "hf_x"
