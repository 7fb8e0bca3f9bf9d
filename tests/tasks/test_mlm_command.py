"""`stoker train mlm` from texts to a model and a report; a run that was killed ends as one that was not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stoker.cli import main
from stoker.tasks.demo.world import make_world
from tasks.models import save_tiny_bert
from tasks.task_runs import assert_resumes_exactly


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mlm")
    save_tiny_bert(folder / "bert")
    texts = [question.context for question in make_world(60, seed=1, training=True)]
    (folder / "one.txt").write_text("\n".join(texts[:30]))
    (folder / "two.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts[30:]))
    return folder


def command(folder: Path, out: Path, *more: str) -> list[str]:
    return [
        "train", "mlm", "--model_name_or_path", str(folder / "bert"), "--train_file", str(folder / "*.txt"),
        str(folder / "two.jsonl"),
        "--do_train", "--max_seq_length", "48", "--per_device_train_batch_size", "4", "--learning_rate", "1e-3",
        "--report_to", "none", "--output_dir", str(out), *more,
    ]  # fmt: skip


def test_a_run_leaves_model_perplexity_card_and_report(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    words = ["--do_eval", "--masking", "spans", "--max_steps", "4", "--eval_strategy", "steps", "--eval_steps", "2",
             "--validation_split_percentage", "20", "--max_eval_samples", "7"]  # fmt: skip
    assert (
        main(command(folder, out, *words, "--overwrite_cache")) == 0
    )  # another test may have tokenized the same files
    shown = capsys.readouterr().err
    assert "tokenizing 2 files" in shown
    assert "of the masked tokens right on 7 rows" in shown
    results = json.loads((out / "all_results.json").read_text())
    assert results["eval_samples"] == 7
    import math

    assert results["eval_perplexity"] == pytest.approx(math.exp(results["eval_loss"]))
    assert 0 <= results["eval_masked_accuracy"] <= 1
    log = [json.loads(line) for line in (out / "run.jsonl").read_text().splitlines()]
    evaluations = [entry["eval_loss"] for entry in log if entry["kind"] == "evaluation"]
    assert evaluations[-1] == evaluations[-2], "the masks of evaluation are the same each time, and so is the loss"
    assert 'pipeline_tag: "fill-mask"' in (out / "README.md").read_text()
    page = (out / "report.html").read_text()
    assert "What it fills in" in page
    assert "[MASK]" in page
    from transformers import pipeline

    assert pipeline("fill-mask", model=str(out), device="cpu")("The river [MASK] here.")
    words = ["--do_eval", "--validation_file", str(folder / "one.txt"), "--line_by_line", "--masking", "words"]
    evaluate = [word for word in command(folder, tmp_path / "other", *words) if word != "--do_train"]
    evaluate[evaluate.index("--model_name_or_path") + 1] = str(out)
    assert main(evaluate) == 0
    assert "on 30 rows" in capsys.readouterr().err


@pytest.mark.part("kills")
def test_a_run_that_was_killed_ends_with_the_same_model(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = "--masking spans --line_by_line --tokens_per_batch 160 --max_steps 8 --save_steps 3 --gradient_accumulation_steps 2"
    assert_resumes_exactly(lambda out: command(folder, out, *more.split()), tmp_path, capsys)


def test_mistakes_are_one_sentence(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "short.txt").write_text("A few words.")
    words = command(folder, tmp_path / "out", "--do_eval")
    words[words.index("--train_file") + 1 : words.index("--do_train")] = [str(tmp_path / "short.txt")]
    assert main(words) == 2
    assert (
        "the texts make 1 row, of which --validation_split_percentage 5 leaves none to evaluate on"
        in capsys.readouterr().err
    )
    words[words.index(str(tmp_path / "short.txt"))] = str(tmp_path / "*.none")
    assert main(words) == 2
    assert "no file has a name like this" in capsys.readouterr().err
