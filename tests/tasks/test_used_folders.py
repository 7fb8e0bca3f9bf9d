"""A folder that was used before: the same run goes on or is complete; another run is refused before anything is written."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from parts import rest_in
from stoker.cli import main
from stoker.tasks.demo.world import as_squad, make_world
from tasks.language_models import save_tiny_llama, write_chats
from tasks.models import save_tiny_bert
from tasks.sentence_files import rows_of, write_lines
from tasks.task_runs import entries

ROWS = rows_of("labelled texts", 16)
WAYS_ON = ("--overwrite_output_dir", "another --output_dir")


def command(bert: Path, data: Path, out: Path, *more: str) -> list[str]:
    return [
        "train", "classify", "--model_name_or_path", str(bert), "--train_file", str(data), "--validation_file", str(data),
        "--do_train", "--do_eval", "--max_steps", "2", "--max_seq_length", "32", "--report_to", "none",
        "--output_dir", str(out), *more,
    ]  # fmt: skip


def contents(folder: Path) -> dict[str, str]:
    """A hash of every file."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lines(tmp_path_factory.mktemp("rows") / "rows.jsonl", ROWS)


@pytest.fixture(scope="module")
def complete(bert: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has ended, with a checkpoint after each of its two steps."""
    out = tmp_path_factory.mktemp("complete") / "out"
    assert main(command(bert, data, out, "--save_steps", "1")) == 0
    return out


@pytest.fixture
def used(complete: Path, tmp_path: Path) -> Path:
    """A copy of that run's folder."""
    return shutil.copytree(complete, tmp_path / "out")


@pytest.fixture
def stopped(used: Path) -> Path:
    """The folder as a kill in the second step leaves it."""
    shutil.rmtree(used / "checkpoint-2")
    for name in ("model.safetensors", "README.md", "report.html", "all_results.json", "train_results.json"):
        (used / name).unlink()
    lines = (used / "run.jsonl").read_text().splitlines(keepends=True)
    kinds = [json.loads(line)["kind"] for line in lines]
    (used / "run.jsonl").write_text("".join(lines[: kinds.index("step") + 1]))
    return used


def assert_refused(argv: list[str], folder: Path, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(folder)
    capsys.readouterr()
    assert main(argv) == 2
    said = capsys.readouterr().err
    assert contents(folder) == before
    sentence = said.splitlines()[-1]
    assert reason in sentence
    assert all(way in sentence for way in WAYS_ON), sentence
    assert "Traceback" not in said


SETTINGS = {
    "--learning_rate 1e-4 --weight_decay 0.1": "(--learning_rate was 5e-05, is 0.0001; --weight_decay was 0.0, is 0.1)",
    "--max_steps 1": "--max_steps was 2, is 1",
    "--max_seq_length 16 --bf16": "--bf16 was False, is True",
    "--per_device_train_batch_size 4": "a step had 8 examples, has 4 examples",
}


@pytest.mark.parametrize("options", SETTINGS)
def test_other_settings_in_a_complete_folder_are_refused(
    bert: Path, data: Path, used: Path, options: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_refused(command(bert, data, used, *options.split()), used, SETTINGS[options], capsys)


def test_other_settings_in_an_interrupted_run_are_refused(
    bert: Path, data: Path, stopped: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = command(bert, data, stopped, "--learning_rate", "1e-4")
    assert_refused(other, stopped, "--learning_rate was 5e-05, is 0.0001", capsys)


def test_a_complete_run_is_not_repeated(bert: Path, data: Path, used: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(command(bert, data, used), used, "leaves no step to train", capsys)
    assert_refused(
        ["train", str(used / "recipe.yaml"), "--output_dir", str(used)], used, "leaves no step to train", capsys
    )
    assert_refused(
        command(bert, data, used, "--resume_from_checkpoint", "True"), used, "raise --max_steps", capsys
    )  # fmt: skip


def test_a_recipe_with_another_setting_is_refused(used: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["train", str(used / "recipe.yaml"), "--output_dir", str(used), "--adam_beta2", "0.9"]
    assert_refused(argv, used, "--adam_beta2 was 0.999, is 0.9", capsys)


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([*ROWS[:-1], {**ROWS[-1], "label": "red"}], "the training data has other contents"),
        (ROWS[:-4], "the number of training rows was 16, is 12"),
    ],
)
def test_other_data_in_a_used_folder_is_refused(
    bert: Path,
    stopped: Path,
    tmp_path: Path,
    rows: list[dict[str, object]],
    reason: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert_refused(command(bert, write_lines(tmp_path / "other.jsonl", rows), stopped), stopped, reason, capsys)


def test_another_model_in_a_used_folder_is_refused(
    data: Path, stopped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = save_tiny_bert(tmp_path / "bert", seed=1)
    assert_refused(command(other, data, stopped), stopped, "the model had other weights before training", capsys)


def test_an_interrupted_run_resumes_from_moved_files(
    bert: Path, data: Path, stopped: Path, complete: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moved, rows = shutil.copytree(bert, tmp_path / "moved"), shutil.copy(data, tmp_path / "rows.jsonl")
    harmless = ["--save_steps", "1", "--logging_steps", "1", "--dataloader_num_workers", "1", "--num_train_epochs", "7"]
    assert main(command(moved, Path(rows), stopped, *harmless)) == 0
    assert "resuming from" in capsys.readouterr().err
    assert (stopped / "model.safetensors").read_bytes() == (complete / "model.safetensors").read_bytes()


def test_a_run_stopped_after_its_last_step_is_finished(
    bert: Path, data: Path, used: Path, complete: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (used / "run.jsonl").read_text().splitlines(keepends=True)
    (used / "run.jsonl").write_text("".join(line for line in lines if json.loads(line)["kind"] != "complete"))
    for name in ("model.safetensors", "README.md", "train_results.json", "all_results.json"):
        (used / name).unlink()
    capsys.readouterr()
    assert main(command(bert, data, used, "--save_steps", "1")) == 0
    assert "no step was left to train after step 2" in capsys.readouterr().err
    assert (used / "model.safetensors").read_bytes() == (complete / "model.safetensors").read_bytes()
    assert "train_loss" not in json.loads((used / "train_results.json").read_text())
    assert all(
        one.get("train_loss") != 0.0 for one in json.loads((used / "trainer_state.json").read_text())["log_history"]
    )
    assert [one["train_loss"] for one in entries(used, "trained")] == [
        one["train_loss"] for one in entries(complete, "trained")
    ]


def test_a_requested_checkpoint_may_be_trained_for_longer(
    bert: Path, data: Path, used: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert main(command(bert, data, used, "--max_steps", "3", "--resume_from_checkpoint", "True")) == 0
    assert "is from a run with other settings" in capsys.readouterr().err + caplog.text
    assert json.loads((used / "trainer_state.json").read_text())["global_step"] == 3


def test_a_complete_job_that_a_scheduler_starts_again_succeeds(
    bert: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STOKER_RUN_ID", "job-7")
    argv = command(bert, data, tmp_path / "out")
    assert main(argv) == 0
    before = contents(tmp_path / "out")
    assert main(argv) == 0
    assert "is complete; there is nothing to do" in capsys.readouterr().err
    assert contents(tmp_path / "out") == before


@pytest.fixture(scope="module")
def inputs(bert: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path, list[str]]]:
    """Model, data and options of each task."""
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "qa.json").write_text(json.dumps(as_squad(make_world(8, seed=1, training=True))))
    (folder / "texts.txt").write_text("\n".join(str(row["text"]) for row in ROWS))
    tagged = [{"tokens": ["Ada", "wrote", str(n)], "ner_tags": ["B-PER", "O", "O"]} for n in range(8)]
    pairs = write_lines(folder / "pairs.jsonl", rows_of("pairs", 16))
    return {
        "qa": (bert, folder / "qa.json", ["--do_train", "--max_seq_length", "96", "--doc_stride", "16"]),
        "ner": (bert, write_lines(folder / "ner.jsonl", tagged), ["--do_train"]),
        "mlm": (bert, folder / "texts.txt", ["--do_train", "--max_seq_length", "32", "--line_by_line"]),
        "embed": (bert, pairs, ["--per_device_train_batch_size", "4", "--samples", "0"]),
        "rerank": (bert, pairs, ["--per_device_train_batch_size", "4", "--samples", "0"]),
        "fewshot": (bert, write_lines(folder / "rows.jsonl", ROWS), ["--examples_per_class", "2", "--samples", "0"]),
        "sft": (save_tiny_llama(folder / "llama"), write_chats(folder / "chats.jsonl"), ["--samples", "0"]),
    }


_PACKAGES = {"sft": "trl", "fewshot": "setfit", "embed": "sentence_transformers", "rerank": "sentence_transformers"}


@pytest.mark.parametrize("task", rest_in("tasks", ["mlm", "sft", "embed", "qa", "ner", "rerank", "fewshot"]))
def test_every_task_refuses_a_folder_of_another_run(
    inputs: dict[str, tuple[Path, Path, list[str]]], tmp_path: Path, task: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if importlib.util.find_spec(_PACKAGES.get(task, "stoker")) is None:
        pytest.skip(f"needs {_PACKAGES[task]}")
    model, rows, options = inputs[task]
    out = tmp_path / "out"
    argv = [
        "train", task, "--model_name_or_path", str(model), "--train_file", str(rows), "--max_steps", "1",
        "--report_to", "none", "--output_dir", str(out), *options,
    ]  # fmt: skip
    assert main(argv) == 0
    assert_refused([*argv, "--adam_beta1", "0.5"], out, "--adam_beta1 was 0.9, is 0.5", capsys)
    assert_refused(argv, out, "leaves no step to train", capsys)


def launched(*argv: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "stoker", "launch", "-n", "2", "--oversubscribe", *argv]
    return subprocess.run(
        words, capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )


@pytest.mark.part("tasks")
@pytest.mark.parametrize("restarts", [[], ["--max_restarts", "1"]])
def test_two_ranks_refuse_a_folder_of_another_run(bert: Path, data: Path, used: Path, restarts: list[str]) -> None:
    before = contents(used)
    done = launched(*restarts, "-m", "stoker", *command(bert, data, used, "--learning_rate", "1e-4"))
    assert done.returncode == 2, done.stderr[-2000:]
    assert "--learning_rate was 5e-05, is 0.0001" in done.stderr
    assert "Traceback" not in done.stderr
    assert contents(used) == before


KILLED_ONCE = """
import os, signal, sys
from pathlib import Path
from stoker.cli import main
from transformers.trainer_callback import CallbackHandler
marker, begin = Path(sys.argv[1]), CallbackHandler.on_step_begin
def on_step_begin(self, args, state, control):
    if state.global_step == 3 and os.environ["RANK"] == "1" and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return begin(self, args, state, control)
CallbackHandler.on_step_begin = on_step_begin
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.part("kills")
def test_two_ranks_that_are_restarted_resume_their_run(bert: Path, data: Path, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(KILLED_ONCE)
    argv = command(bert, data, tmp_path / "out", "--max_steps", "5", "--save_steps", "2", "--overwrite_output_dir")
    done = launched("--max_restarts", "1", str(tmp_path / "script.py"), str(tmp_path / "killed"), *argv)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "killed").exists()
    assert f"restarted (1) after a failure; resuming from {tmp_path / 'out' / 'checkpoint-2'}" in done.stderr
    assert [one["resumed_at"] for one in entries(tmp_path / "out", "start")] == [None, 2]
    assert entries(tmp_path / "out", "complete")
