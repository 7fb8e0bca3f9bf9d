"""Classification data, truncation and metrics: as GLUE and the tokenizer define them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from stoker.errors import UserError
from stoker.tasks.classify.data import GLUE, Labels, choose_columns, read_examples
from stoker.tasks.classify.features import make_rows
from stoker.tasks.classify.metrics import f1, matthews_correlation, measure, pearson, spearmanr
from tasks.models import byte_level, wordpiece

MRPC = ["Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"]


@pytest.mark.parametrize(
    ("names", "task", "texts", "label"),
    [
        (MRPC, "mrpc", ("#1 String", "#2 String"), "Quality"),
        (MRPC, None, ("#1 String", "#2 String"), "Quality"),
        (["sentence", "label", "idx"], "sst2", ("sentence",), "label"),
        (["question", "sentence", "label"], "qnli", ("question", "sentence"), "label"),
        (["premise", "hypothesis", "label"], "mnli", ("premise", "hypothesis"), "label"),
        (["id", "text", "target"], None, ("text",), "target"),
    ],
)
def test_columns_are_found_by_task_or_by_name(
    names: list[str], task: str | None, texts: tuple[str, ...], label: str
) -> None:
    columns = choose_columns(names, None, None, task)
    assert (columns.texts, columns.label) == (texts, label)


def test_named_columns_must_exist() -> None:
    with pytest.raises(UserError, match=r"no column 'body' \(--text_column_names\); the columns are a, b"):
        choose_columns(["a", "b"], ["body"], None, None)
    with pytest.raises(UserError, match="no column looks like a text"):
        choose_columns(["a", "b"], None, None, None)


def test_a_tsv_with_quotation_marks_as_text_is_read_completely(tmp_path: Path) -> None:
    path = tmp_path / "d.tsv"
    path.write_text('label\tsentence1\tsentence2\n1\tHe said " no\tShe said "no"\n0\tOne\tTwo\n')
    examples = read_examples(path)
    assert examples[0].texts == ('He said " no', 'She said "no"')
    assert [example.label for example in examples] == ["1", "0"]


def test_bad_rows_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"text": "fine", "label": n % 2} for n in range(300)]
    rows[5] = {"text": "", "label": 0}
    rows[9] = {"text": "fine", "label": None}  # type: ignore[dict-item]
    path = tmp_path / "d.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    with caplog.at_level("WARNING", logger="stoker"):
        assert len(read_examples(path)) == 298
    assert "line 6: its text is empty" in caplog.text
    assert "line 10: it has no label" in caplog.text


@pytest.mark.parametrize(
    ("label", "regression", "message"),
    [
        ([1], False, "its label is a list"),
        (float("nan"), True, "its label nan is not a number"),
        ("x", True, "is not a number"),
    ],
)
def test_a_missing_or_invalid_label_is_a_bad_row(
    tmp_path: Path, label: object, regression: bool, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"text": "fine", "label": n % 2} for n in range(200)] + [{"text": "fine", "label": label}]
    path = tmp_path / "d.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    with caplog.at_level("WARNING", logger="stoker"):
        assert len(read_examples(path, regression=regression)) == 200
    assert message in caplog.text


@pytest.mark.parametrize(
    ("labels", "fractions"), [(("0", "0.5"), True), (("0.0", "1.0"), False), (("no", "0.5"), False)]
)
def test_fractional_labels_are_not_treated_as_classes(labels: tuple[str, ...], fractions: bool) -> None:
    from stoker.tasks.classify.labelled_examples import _are_fractions

    assert _are_fractions(labels) is fractions


def test_labels_are_ordered_as_numbers_or_words() -> None:
    from stoker.tasks.classify.data import Example

    def labels(*values: str) -> tuple[str, ...]:
        return Labels.of([Example("", ("",), value) for value in values]).names

    assert labels("10", "2", "0") == ("0", "2", "10")
    assert labels("yes", "no") == ("no", "yes")
    assert labels("1", "-1") == ("-1", "1")
    assert labels("--5", "²", "3", "-") == ("3", "-", "--5", "²")


def test_minus_one_is_a_label_like_any_other(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text("\n".join(json.dumps({"text": "fine", "label": n}) for n in (-1, 0, 1)))
    assert Labels.of(read_examples(path)).names == ("-1", "0", "1")
    assert [example.label for example in read_examples(path, regression=True)] == [-1.0, 0.0, 1.0]


@pytest.mark.parametrize("kind", [wordpiece, byte_level], ids=["wordpiece", "byte level"])
@pytest.mark.parametrize("length", [12, 13, 20, 64])
def test_long_rows_are_truncated_as_the_tokenizer_does(tmp_path: Path, kind: object, length: int) -> None:
    tokenizer = kind()  # type: ignore[operator]
    words = [
        "the",
        "river",
        "flows",
        "through",
        "a",
        "town",
        "that",
        "nobody",
        "has",
        "ever",
        "read",
        "about",
        "in",
        "any",
        "book",
    ]
    pairs = [(" ".join(words[:a]), " ".join(words[:b])) for a in (1, 4, 5, 9, 15) for b in (1, 4, 5, 9, 15)]
    path = tmp_path / "d.jsonl"
    path.write_text("\n".join(json.dumps({"sentence1": a, "sentence2": b, "label": 0}) for a, b in pairs))
    rows = make_rows(read_examples(path), tokenizer, Labels(("0", "1")), max_seq_length=length)
    for index, pair in enumerate(pairs):
        expected = tokenizer(*pair, truncation=True, max_length=length)
        assert rows[index]["input_ids"].tolist() == expected["input_ids"], pair
        assert rows.lengths[index] == len(expected["input_ids"])


def test_metrics_by_hand() -> None:
    true, predicted = np.array([1, 1, 0, 0, 1]), np.array([1, 0, 0, 1, 1])
    assert f1(predicted, true) == pytest.approx(2 * 2 / (3 + 3))
    assert matthews_correlation(predicted, true) == pytest.approx((2 * 1 - 1 * 1) / np.sqrt(3 * 3 * 2 * 2))
    assert f1(np.array([0, 1, 2]), np.array([0, 1, 1]), 3) == pytest.approx((1 + 2 / 3 + 0) / 3)
    a, b = np.array([1.0, 2.0, 3.0, 4.0]), np.array([1.0, 2.0, 3.0, 100.0])
    assert spearmanr(a, b) == pytest.approx(1.0)
    assert pearson(a, b) == pytest.approx(np.corrcoef(a, b)[0, 1])
    assert spearmanr(np.array([1.0, 1.0, 2.0]), np.array([1.0, 2.0, 3.0])) == pytest.approx(np.sqrt(3) / 2)
    assert pearson(np.ones(3), a[:3]) == 0.0


def test_three_classes_of_which_two_occur_are_three_classes() -> None:
    logits = np.array([[9.0, 0, 0], [0, 9, 0], [0, 9, 0]])
    found = measure(["f1"], logits, np.array([0, 1, 0]), regression=False)
    assert found["f1"] == pytest.approx((2 / 3 + 2 / 3) / 2)
    assert measure(["f1"], logits[:, :2], np.array([1, 0, 0]), regression=False)["f1"] == 0.0
    assert measure(["f1"], logits, np.array([1, 0, 2]), regression=False)["f1"] == 0.0


def test_an_error_is_not_averaged_with_a_score() -> None:
    values = np.array([1.0, 2.0])
    assert measure(["mse", "pearson"], values, values, regression=True) == {"mse": 0.0, "pearson": pytest.approx(1.0)}


def test_each_glue_task_has_its_metrics() -> None:
    found = measure(GLUE["mrpc"].metrics, np.array([[0.1, 0.9], [0.8, 0.2]]), np.array([1, 1]), regression=False)
    assert found == {"accuracy": 0.5, "f1": pytest.approx(2 / 3), "combined_score": pytest.approx((0.5 + 2 / 3) / 2)}


@pytest.mark.data
def test_the_real_mrpc_is_read_completely(data: Path) -> None:
    for name, count in (("train", 3668), ("dev", 408), ("test", 1725)):
        examples = read_examples(data / "mrpc" / f"{name}.tsv", task="mrpc")
        assert len(examples) == count
        assert len(examples[0].texts) == 2


def test_a_number_of_5000_digits_costs_at_most_its_own_row(tmp_path: Path) -> None:
    """Python refuses to convert it; as a class or an id it is as good as any other word."""
    digits = "9" * 5000
    rows = [f'{{"sentence": "x", "label": {digits}, "id": 1}}', f'{{"sentence": "y", "label": 1, "id": {digits}}}']
    for name, text in (("d.json", f"[{', '.join(rows)}]"), ("d.jsonl", "\n".join(rows))):
        (tmp_path / name).write_text(text)
        found = read_examples(tmp_path / name)
        assert [(example.id, example.label) for example in found] == [("1", digits), (digits, "1")]
        with pytest.raises(UserError, match=r"1 of 2 rows .* cannot be used"):
            read_examples(tmp_path / name, regression=True)
    from stoker.tasks.classify.labelled_examples import _are_fractions

    assert not _are_fractions([digits, "1"])


def test_other_label_names_are_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from stoker.cli import main

    command = ["train", "classify", "--model_name_or_path", "m", "--do_eval", "--dataset_name", "d"]
    assert main([*command, "--output_dir", str(tmp_path), "--label_names", "class"]) == 2
    assert "--label_names class" in capsys.readouterr().err


def test_options_that_withhold_predictions_are_ignored_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    import logging

    from stoker.tasks.classify.fine_tune import ClassifyOptions, predict_all_rows
    from stoker.tasks.option_parser import OptionParser

    # Whatever commands that ran before have set up: each record reaches the root logger, once.
    monkeypatch.setattr(logging.getLogger("stoker"), "propagate", True)
    monkeypatch.setattr(logging.getLogger("stoker"), "handlers", [])
    needed = ["--model_name_or_path", "m", "--output_dir", str(tmp_path)]
    withheld = ["--no_eval_do_concat_batches", "--batch_eval_metrics", "--prediction_loss_only"]
    *_, args = OptionParser("train classify", ClassifyOptions).read([*needed, *withheld])
    predict_all_rows(args)
    assert (args.eval_do_concat_batches, args.batch_eval_metrics, args.prediction_loss_only) == (True, False, False)
    assert len([record for record in caplog.records if "is ignored" in record.message]) == 3
    caplog.clear()
    predict_all_rows(args)
    assert not caplog.records
