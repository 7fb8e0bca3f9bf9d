"""`stoker demo` from world to report, with a tiny model and a few steps."""

from __future__ import annotations

import re
import shlex
import signal
import sys
from pathlib import Path

import pytest

from rig import warm
from stoker.cli import main
from stoker.run_report.log import read_run
from stoker.tasks.demo import speed
from stoker.tasks.demo.demo_run import _affordable
from tasks.task_runs import STOPPED


@pytest.mark.part("tasks")
def test_the_demo_shows_before_and_after_three_answers_and_a_report(
    bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "demo"
    words = ["demo", "--model", str(bert), "--questions", "36", "--no-compare", "--output_dir", str(out)]
    assert main(words) == 0
    message = capsys.readouterr().out
    assert "before: exact match" in message
    assert "after:  exact match" in message
    assert message.count("score") == 3
    assert (out / "report.html").exists()
    assert (out / "model.safetensors").exists()
    run = read_run(out)
    assert run.evaluations[0]["step"] == 0
    assert run.finished
    (out / "stale").mkdir()
    assert main(words) == 0, "a second time replaces the first"
    assert not (out / "stale").exists()
    again = tmp_path / "again"
    assert main(["train", str(out / "recipe.yaml"), "--output_dir", str(again)]) == 0
    first, second = (one.evaluations[-1]["eval_f1"] for one in (read_run(out), read_run(again)))
    assert first == pytest.approx(second, abs=1e-6), "its recipe repeats the training"


def test_a_demo_that_is_stopped_prints_the_command_that_resumes_it(bert: Path, tmp_path: Path) -> None:
    words = ["demo", "--model", str(bert), "--questions", "36", "--no-compare", "--output_dir", str(tmp_path / "demo")]
    stopped = warm.run(
        [sys.executable, "-c", STOPPED, "2", str(int(signal.SIGTERM)), *words],
        capture_output=True, text=True, timeout=300, transformers=True,
    )  # fmt: skip
    assert stopped.returncode == 128 + signal.SIGTERM, stopped.stderr[-2000:]
    command = re.search(r"To resume:\n *(.*)", stopped.stdout + stopped.stderr)
    assert command is not None
    argv = shlex.split(command[1])
    assert main(argv[argv.index("train") :]) == 0
    assert read_run(tmp_path / "demo").finished


@pytest.mark.parametrize("name", ["train.json", "mine.txt"])
def test_a_folder_that_is_not_the_demos_is_not_touched(
    bert: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).write_text("precious")
    monkeypatch.chdir(tmp_path)
    for folder in (".", str(tmp_path)):
        assert main(["demo", "--model", str(bert), "--no-compare", "--output_dir", folder]) == 2
        assert "is not empty and was not created by a demo" in capsys.readouterr().err
    assert (tmp_path / name).read_text() == "precious"
    assert main(["demo", "--model", str(bert), "--output_dir", str(tmp_path / name)]) == 2
    assert f"--output_dir {tmp_path / name} cannot be used: Not a directory" in capsys.readouterr().err


def test_a_model_that_cannot_be_loaded_leaves_the_folder_unchanged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / ".stoker-demo").touch()
    (tmp_path / "report.html").write_text("an earlier demo")
    assert main(["demo", "--model", "no/such-model", "--no-compare", "--output_dir", str(tmp_path)]) == 2
    assert "or name a folder with --model\n" in capsys.readouterr().err
    assert (tmp_path / "report.html").exists()


def test_both_sides_take_steps_in_turns(bert: Path, tmp_path: Path) -> None:
    from stoker.tasks.demo.world import as_squad, make_world
    from stoker.tasks.training_run import write_json

    write_json(tmp_path / "train.json", as_squad(make_world(24, seed=1, training=True)))
    seconds = speed.compare(tmp_path, str(bert), steps=2, batch=4, max_seq_length=160)
    assert {side: len(values) for side, values in seconds.items()} == {"stock": 2, "stoker": 2}
    assert all(value > 0 for values in seconds.values() for value in values)


def test_the_number_of_questions_follows_from_the_measured_speed() -> None:
    fast, slow = ({"sides": {"Stoker": [step] * 10}} for step in (0.3, 2.5))
    assert _affordable(fast, 170) == 3000
    assert 600 <= _affordable(slow, 170) < 1000
    assert _affordable({"sides": {"Stoker": [60.0]}}, 170) == 600
