"""What a classifier's scores are worth is shown beside them: the constant answer, each class, and the confusions."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from stoker.tasks.classify.worth import ConstantAnswer, tables


def test_the_constant_answer_is_the_most_frequent_class_of_the_training_data() -> None:
    known, true = np.array([0, 1, 1, 1]), np.array([0, 0, 0, 1])
    constant = ConstantAnswer.of(["accuracy", "f1"], known, true, ("no", "yes"))
    assert constant is not None
    assert constant.answer == "yes"
    assert constant.scores["accuracy"] == 0.25
    assert constant.scores["f1"] == pytest.approx(2 * 1 / (4 + 1))  # one of four right, all of class 1 found


def test_the_constant_number_is_the_mean() -> None:
    constant = ConstantAnswer.of(["mse", "pearson"], np.array([1.0, 3.0]), np.array([2.0, 4.0]), ())
    assert constant is not None
    assert (constant.answer, constant.scores) == ("2", {"mse": 2.0, "pearson": 0.0})


def test_nothing_is_compared_without_labels() -> None:
    assert ConstantAnswer.of(["accuracy"], np.array([]), np.array([]), ("a", "b")) is None


def test_tables_have_a_row_per_class_and_count_confusions() -> None:
    true, predicted = np.array([0, 0, 1, 2]), np.array([0, 1, 1, 1])
    scores, confused = tables(predicted, true, ("a", "b", "c"), None)
    assert scores["rows"] == [
        ["a", "1.000", "0.500", "0.667", "2"],
        ["b", "0.333", "1.000", "0.500", "1"],
        ["c", "0.000", "0.000", "0.000", "1"],
    ]
    assert confused["rows"] == [["a", 1, 1, ""], ["b", "", 1, ""], ["c", "", 1, ""]]


def test_many_classes_get_a_list_of_confusions_and_short_names() -> None:
    classes = tuple(f"class {number} " + 30 * "x" for number in range(20))
    true = np.arange(20)
    predicted = np.where(true < 3, 7, true)
    _, confused = tables(predicted, true, classes, None)
    assert [row[2] for row in confused["rows"]] == ["1", "1", "1"]
    assert all(len(name) <= 24 for row in confused["rows"] for name in row)


def test_the_command_says_what_the_score_is_worth(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from stoker.cli import main
    from tasks.models import save_tiny_bert

    save_tiny_bert(tmp_path / "model")
    rows = ["text\tlabel", *(f"text number {number}\t{'rare' if number % 4 == 0 else 'often'}" for number in range(16))]
    (tmp_path / "rows.tsv").write_text("\n".join(rows) + "\n")
    out = tmp_path / "out"
    assert main([
        "train", "classify", "--model_name_or_path", str(tmp_path / "model"), "--train_file", str(tmp_path / "rows.tsv"),
        "--validation_file", str(tmp_path / "rows.tsv"), "--do_train", "--do_eval", "--max_steps", "1", "--learning_rate", "1e-9",
        "--output_dir", str(out), "--skip_memory_check",
    ]) == 0  # fmt: skip
    printed = capsys.readouterr().err
    assert 'always answering "often" scores accuracy 0.7500' in printed
    assert "the model has not learned the task yet" in printed  # one step with that rate
    log = [json.loads(line) for line in (out / "run.jsonl").read_text().splitlines()]
    titles = [table["title"] for record in log if record.get("kind") == "tables" for table in record["tables"]]
    assert titles == ["Scores by class", "Which classes are confused"]
    assert "Always answering “often” scores" in (out / "report.html").read_text()
