"""Rows of texts: the kind follows from the columns, lists are expanded, bad rows are counted."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from stoker.errors import UserError
from stoker.tasks.sentences.text_rows import LABELLED, PAIRS, SCORED, TRIPLETS, choose_columns, read_text_rows


@pytest.mark.parametrize(
    ("names", "kind", "used"),
    [
        (["anchor", "positive"], PAIRS, ("anchor", "positive")),
        (["id", "question", "context", "title"], PAIRS, ("question", "context")),
        (["Positive", "Negative", "Query"], TRIPLETS, ("Query", "Positive", "Negative")),
        (["query", "pos", "neg_2", "neg_10", "neg_1"], TRIPLETS, ("query", "pos", "neg_1", "neg_2", "neg_10")),
        (["anchor", "positive", "negative", "score"], TRIPLETS, ("anchor", "positive", "negative")),
        (["sentence1", "sentence2", "score"], SCORED, ("sentence1", "sentence2", "score")),
        (["Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"], SCORED, ("#1 String", "#2 String", "Quality")),
        (["text", "label"], LABELLED, ("text", "label")),
        (["question", "intent"], LABELLED, ("question", "intent")),
    ],
)
def test_the_kind_follows_from_the_columns(names: list[str], kind: str, used: tuple[str, ...]) -> None:
    columns = choose_columns(names, None, None, "file")
    assert (columns.kind, columns.names) == (kind, used)


def test_named_columns_are_used_in_their_order() -> None:
    names = ["b", "a", "c", "label", "score"]
    assert choose_columns(names, ["a", "b"], None, "f").names == ("a", "b", "score")
    assert choose_columns(names, ["a", "b"], "none", "f").kind == PAIRS
    assert choose_columns(names, ["a", "b", "c"], None, "f").names == ("a", "b", "c")
    assert choose_columns(names, ["c"], "label", "f").kind == LABELLED
    assert choose_columns(["anchor", "positive", "label"], None, "NONE", "f").kind == PAIRS


@pytest.mark.parametrize(
    ("texts", "label", "message"),
    [
        (["x"], None, r"has no column 'x' \(--text_column_names\); its columns are a, b"),
        (["a"], "none", "a single text needs a class"),
        (["a", "b", "c"], "d", "without a label"),
        (["a", "b"], "b", "b is named as a text and as the label"),
        (None, None, "has no columns that can be trained on: its columns are a, b, c, d; pairs: two texts"),
    ],
)
def test_columns_that_do_not_fit_give_one_sentence(texts: list[str] | None, label: str | None, message: str) -> None:
    with pytest.raises(UserError, match=message):
        choose_columns(["a", "b", "c", "d"], texts, label, "file")


def read(tmp_path: Path, rows: list[dict[str, Any]], **options: Any) -> Any:
    path = tmp_path / "d.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return read_text_rows(path, **options)


def test_lists_of_positives_and_negatives_give_rows_of_equal_width(tmp_path: Path) -> None:
    rows = [
        {"query": "q", "pos": ["p1", "p2"], "neg": ["n1", "n2", "n3"]},
        {"query": "r", "pos": ["s"], "neg": ["t", "u"]},
    ]
    found = read(tmp_path, rows)
    assert found.columns.texts == ("query", "pos", "neg_1", "neg_2")
    assert found.texts == [("q", "p1", "n1", "n2"), ("q", "p2", "n1", "n2"), ("r", "s", "t", "u")]


def test_lists_of_documents_with_scores_give_scored_pairs(tmp_path: Path) -> None:
    found = read(tmp_path, [{"query": "q", "documents": ["a", "b"], "labels": [1, 0.5]}])
    assert (found.kind, found.texts, found.labels) == (SCORED, [("q", "a"), ("q", "b")], [1.0, 0.5])


def test_a_file_without_a_header_gets_its_columns_from_an_option(tmp_path: Path) -> None:
    path = tmp_path / "sts.csv"
    path.write_text('A plane.,"An air plane, large.",5.0\nA man.,A cat.,0.2\n')
    with pytest.raises(UserError, match="--column_names if the first line of a CSV or TSV file is a row"):
        read_text_rows(path)
    found = read_text_rows(path, names=["sentence1", "sentence2", "score"])
    assert found.texts == [("A plane.", "An air plane, large."), ("A man.", "A cat.")]
    assert found.labels == [5.0, 0.2]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"sentence1": "", "sentence2": "b", "score": 1}, "its sentence1 is empty"),
        ({"sentence1": "a", "sentence2": 3, "score": 1}, "its sentence2 is an int, not text"),
        ({"sentence1": "a", "sentence2": "b", "score": "high"}, "its score 'high' is not a number"),
        ({"sentence1": "a", "sentence2": "b", "score": None}, "it has no score"),
        ({"sentence1": "a", "sentence2": "b", "score": float("nan")}, "is not a number"),
        ({"sentence1": "a", "sentence2": ["b", "c"], "score": 1}, "it has 2 sentence2 and 1 values of score"),
        ({"sentence1": ["a"], "sentence2": "b", "score": 1}, "its sentence1 is a list, not text"),
    ],
)
def test_a_row_that_cannot_be_used_is_reported_with_its_line(
    tmp_path: Path, bad: dict[str, Any], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    good = [{"sentence1": "a", "sentence2": "b", "score": n % 3} for n in range(200)]
    with caplog.at_level("WARNING", logger="stoker"):
        assert len(read(tmp_path, [*good, bad])) == 200
    assert "line 201" in caplog.text
    assert message in caplog.text
    with pytest.raises(UserError, match="stopped at the first bad row because of --strict"):
        read(tmp_path, [*good, bad], strict=True)


def test_a_warning_tells_how_many_negatives_are_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("stoker"), "propagate", True)  # whatever commands that ran before have set up
    rows = [{"query": "q", "positive": "p", "negatives": ["a", "b", "c"][:count]} for count in (3, 1)]
    read(tmp_path, rows)
    assert "rows have 1 to 3 negatives; the first 1 of each are used" in caplog.text
