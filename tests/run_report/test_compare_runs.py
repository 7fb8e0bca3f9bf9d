"""`stoker runs` shows which settings differ, sorts by a metric, and draws the curves of several runs over each other."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from attack.run_logs import MARKUP, variants
from stoker.cli import main
from stoker.process_life import facts_of
from stoker.run_report.compare import is_lower_better
from stoker.run_report.log import NAME, RunLog


def log_a_run(
    folder: Path, rate: float, f1: list[float], *, end: str | None = "finished", typed: str = "", **start: Any
) -> Path:
    log = RunLog(folder)
    command = f"stoker train qa --train_file a.json --output_dir {folder} --seed 1 {typed}"
    log.write("start", task="qa", model="org/bert", command=command, machine={"cpu": "A CPU", "threads": 2},
              arguments={"learning_rate": rate, "output_dir": str(folder), "num_train_epochs": 2.0}, **start)  # fmt: skip
    for step in range(1, 21):
        log.write("step", step=step, loss=1 / step + rate, tokens_per_second=1000 / rate)
    for number, value in enumerate(f1):
        log.write("evaluation", step=10 * number, eval_f1=value, eval_loss=1 - value / 100)
    if end:
        log.write("end", reason=end, step=20)
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    log_a_run(tmp_path / "out" / "slow", 1.0, [10.0, 60.0, 50.0])
    log_a_run(tmp_path / "out" / "deep" / "fast", 2.0, [20.0, 80.0], typed="--max_seq_length 128 --live")
    log_a_run(tmp_path / "out" / "gone", 4.0, [], end=None, process={**facts_of(os.getpid()), "started": "1"})
    (tmp_path / "out" / "no run here").mkdir()
    return tmp_path / "out"


def as_json(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main(["runs", *argv, "--json"]) == 0
    return dict(json.loads(capsys.readouterr().out))


def test_runs_are_sorted_by_their_best_score_with_the_settings_that_differ(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = as_json(capsys, str(runs))
    assert found["by"] == "eval_f1"
    assert [Path(one["folder"]).name for one in found["runs"]] == ["fast", "slow", "gone"]
    assert [one["best"] for one in found["runs"]] == [{"value": 80.0, "step": 10}, {"value": 60.0, "step": 10}, None]
    assert [one["status"] for one in found["runs"]] == ["finished", "finished", "killed"]
    assert [one["tokens_per_second"] for one in found["runs"]] == [500.0, 1000.0, 250.0]
    assert [one["settings"] for one in found["runs"]] == [
        {"max_seq_length": 128, "learning_rate": 2},
        {"max_seq_length": None, "learning_rate": 1},
        {"max_seq_length": None, "learning_rate": 4},
    ]


@pytest.mark.parametrize(
    ("by", "metric", "order"),
    [
        ("loss", "loss", ["slow", "fast", "gone"]),
        ("eval_loss", "eval_loss", ["fast", "slow", "gone"]),
        ("tokens_per_second", "tokens_per_second", ["slow", "fast", "gone"]),
        ("f1", "eval_f1", ["fast", "slow", "gone"]),
    ],
)
def test_runs_are_sorted_by_the_metric_that_is_named(
    runs: Path, capsys: pytest.CaptureFixture[str], by: str, metric: str, order: list[str]
) -> None:
    found = as_json(capsys, str(runs), "--by", by)
    assert found["by"] == metric
    assert [Path(one["folder"]).name for one in found["runs"]] == order


def test_lower_is_better_for_losses_and_errors_only() -> None:
    assert [is_lower_better(name) for name in ("eval_loss", "loss", "eval_perplexity", "duration", "eval_mse")] == [
        True
    ] * 5
    assert [is_lower_better(name) for name in ("eval_f1", "eval_accuracy", "tokens_per_second")] == [False] * 3


def test_the_table_has_a_line_for_each_run(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", str(runs / "slow"), str(runs / "gone"), str(runs / "deep")]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert lines[0] == ["run", "status", "f1", "tokens/s", "duration", "learning_rate", "max_seq_length"]
    assert lines[2][:6] == ["1", "deep/fast", "finished", "80", "(step", "10)"]
    assert lines[4] == ["3", "gone", "killed", "-", "250", "0", "s", "4", "-"]


def log_a_task(folder: Path, task: str, scores: dict[str, float], **settings: Any) -> None:
    log = RunLog(folder)
    inner = {
        "router_mapping": {"a": folder.name},
        "ddp_broadcast_buffers": folder.name == "a",
        "eval_steps": len(folder.name),
    }
    log.write("start", task=task, model="org/bert", command=f"stoker train {task} --output_dir {folder}",
              arguments=inner, settings=settings)  # fmt: skip
    log.write("evaluation", step=1, **{f"eval_{name}": value for name, value in scores.items()})
    log.write("end", reason="finished", step=1)


def test_each_task_has_a_table_sorted_by_its_own_score(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log_a_task(tmp_path / "a", "qa", {"f1": 2.342}, learning_rate=5e-5, seed=42)
    log_a_task(tmp_path / "bb", "fewshot", {"f1": 0.9, "accuracy": 0.7}, learning_rate=2e-5, seed=42)
    log_a_task(tmp_path / "c", "fewshot", {"f1": 0.8, "accuracy": 0.87}, learning_rate=1e-5, seed=42)
    assert main(["runs", str(tmp_path)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert lines[0] == ["fewshot,", "2", "runs"]
    assert lines[1] == ["run", "accuracy", "tokens/s", "duration", "learning_rate"]
    assert lines[3] == ["1", "c", "0.87", "-", "0", "s", "1e-05"]
    assert lines[4] == ["2", "bb", "0.7", "-", "0", "s", "2e-05"]
    assert lines[-4] == ["qa,", "1", "run"]
    assert lines[-3] == ["run", "f1", "tokens/s", "duration"]
    found = as_json(capsys, str(tmp_path))
    assert [(one["task"], one["by"]) for one in found["runs"]] == [("fewshot", "eval_accuracy")] * 2 + [
        ("qa", "eval_f1")
    ]
    page = tmp_path / "page.html"
    assert main(["runs", str(tmp_path), "--html", str(page)]) == 0
    assert [f"<h2>{name}</h2>" in page.read_text() for name in ("fewshot", "qa", "ner")] == [True, True, False]
    assert "ddp_broadcast_buffers" not in page.read_text()


def test_a_table_has_six_settings_at_most_and_names_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [
        "seed",
        "weight_decay",
        "learning_rate",
        "max_steps",
        "warmup_steps",
        "bf16",
        "optim",
        "per_device_train_batch_size",
    ]
    for number in range(2):
        log_a_task(tmp_path / f"run{number}", "ner", {"f1": 0.5}, **dict.fromkeys(names, number))
    assert main(["runs", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    head = next(line for line in printed.splitlines() if "tokens/s" in line).split()
    assert head[4:] == [
        "learning_rate",
        "max_steps",
        "per_device_train_batch_size",
        "seed",
        "warmup_steps",
        "weight_decay",
    ]
    assert "They also differ in optim, bf16 and 1 more; --json shows all." in " ".join(printed.split())


def test_a_narrow_terminal_shows_the_settings_that_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(2):
        long = {"train_file": f"/a/folder/with/a/long/name/{number}.json", "num_train_epochs": number}
        log_a_task(tmp_path / f"entities-{number}", "ner", {"f1": 0.5}, learning_rate=number, seed=number, **long)
    monkeypatch.setattr("stoker.cli.runs._WIDE", 80)
    assert main(["runs", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    head = next(line for line in printed.splitlines() if "tokens/s" in line)
    assert head.split()[4:] == ["learning_rate"]
    assert len(head.rstrip()) <= 80
    assert "They also differ in train_file, num_train_epochs, seed and" in " ".join(printed.split())


def test_the_page_draws_the_curves_over_each_other_and_escapes_names(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log_a_run(runs / "<img src=x>", 3.0, [30.0, 40.0], typed=f"--note '{MARKUP}'")
    page = runs / "compare.html"
    assert main(["runs", str(runs), "--html", str(page)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(page)
    text = page.read_text()
    assert text.count("<figure>") == 5
    assert "F1 of 3 runs" in text or "f1 of 3 runs" in text
    assert "Loss over time of 4 runs" in text
    assert "<img" not in text
    assert "<script" not in text
    assert "#0a0b" not in text, "every placeholder colour became a variable"


def test_more_runs_than_can_be_told_apart_are_in_the_table_only(tmp_path: Path) -> None:
    for number in range(12):
        log_a_run(tmp_path / f"run{number}", 1.0 + number, [float(number)])
    assert main(["runs", str(tmp_path), "--html", str(tmp_path / "page.html")]) == 0
    text = (tmp_path / "page.html").read_text()
    assert "The curves are those of the first 10." in text
    assert "Loss of 10 runs" in text
    assert text.count('class="swatch"') == 10


def test_bad_requests_give_one_sentence_and_exit_code_2(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / NAME).touch()
    for argv, words in (
        ([str(tmp_path / "missing")], "does not exist"),
        ([str(tmp_path / "empty")], "has no run.jsonl"),
        ([str(runs), str(tmp_path / "empty")], "has no run.jsonl"),
        (
            [str(runs), "--by", "f2"],
            "--by f2 was not measured; choose one of f1, eval_loss, tokens_per_second, loss, duration",
        ),
        ([str(tmp_path / "new"), "--by", "f1"], "have logged nothing yet"),
        ([str(runs), "--html", str(tmp_path / "nowhere" / "x.html")], "cannot be written"),
        ([], "required: DIR"),
    ):
        assert main(["runs", *argv]) == 2, argv
        captured = capsys.readouterr()
        assert words in captured.err, captured.err
        assert captured.err.count("\n") == 1
        assert captured.out == ""
    assert main(["runs", str(tmp_path / "new")]) == 0, "a run that has not begun is listed"
    assert "not started" in capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "stoker.run_report.overlay", raising=False)
    assert main(["runs", str(runs), "--html", str(tmp_path / "x.html")]) == 2
    assert "pip install 'stoker[report]'" in capsys.readouterr().err
    assert not (tmp_path / "x.html").exists()


def test_any_log_can_be_compared(tree_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = log_a_run(tree_path / "good", 1.0, [1.0])
    for number, (name, folder) in enumerate(variants(11, tree_path / "odd", more=5)):
        if number % 25:
            continue
        assert main(["runs", str(folder), str(good)]) in (0, 2), name
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        assert captured.out or captured.err.count("\n") == 1
