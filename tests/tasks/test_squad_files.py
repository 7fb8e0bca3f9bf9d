"""Every layout of SQuAD data gives the same questions; problems in a file are reported with their position."""

from __future__ import annotations

import csv
import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet as parquet
import pytest

from stoker.errors import UserError
from stoker.tasks.qa.data import Question, read_questions

CONTEXT = "Ada wrote the letter in 1843. Bo read it."
QUESTIONS = [
    Question("a", "Who wrote it?", CONTEXT, ("Ada",), (0,)),
    Question("b", "When?", CONTEXT, ("1843", "in 1843"), (24, 21)),
]


def nested(questions: list[Question]) -> dict[str, Any]:
    qas = [
        {
            "id": q.id,
            "question": q.question,
            "answers": [{"text": t, "answer_start": s} for t, s in zip(q.answers, q.starts, strict=True)],
        }
        for q in questions
    ]
    return {"version": "1.1", "data": [{"title": "t", "paragraphs": [{"context": CONTEXT, "qas": qas}]}]}


def flat(questions: list[Question]) -> list[dict[str, Any]]:
    return [
        {
            "id": q.id,
            "question": q.question,
            "context": q.context,
            "answers": {"text": list(q.answers), "answer_start": list(q.starts)},
        }
        for q in questions
    ]


def write(path: Path, content: str | bytes) -> Path:
    raw = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
    return path


def as_csv(path: Path, answers: Any) -> Path:
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, ["id", "question", "context", "answers"])
        writer.writeheader()
        for row in flat(QUESTIONS):
            writer.writerow({**row, "answers": answers(row["answers"])})
    return path


@pytest.mark.parametrize(
    "name", ["n.json", "n.json.gz", "list.json", "data.json", "lines.json", "l.jsonl", "l.jsonl.gz"]
)
def test_every_json_layout_gives_the_same_questions(tmp_path: Path, name: str) -> None:
    lines = "\n".join(json.dumps(row) for row in flat(QUESTIONS)) + "\n"
    content = {
        "n": json.dumps(nested(QUESTIONS)),
        "list": json.dumps(flat(QUESTIONS)),
        "data": json.dumps({"data": flat(QUESTIONS)}),
        "lines": lines,
        "l": lines,
    }[name.partition(".")[0]]
    assert read_questions(write(tmp_path / name, content), training=True) == QUESTIONS


@pytest.mark.parametrize("form", [json.dumps, repr], ids=["JSON", "as Python writes it"])
def test_csv_gives_the_same_questions(tmp_path: Path, form: Any) -> None:
    assert read_questions(as_csv(tmp_path / "d.csv", form), training=True) == QUESTIONS


def test_parquet_gives_the_same_questions(tmp_path: Path) -> None:
    path = tmp_path / "d.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(flat(QUESTIONS)), path)
    assert read_questions(path, training=True) == QUESTIONS


def test_broken_parquet_and_parquet_without_its_package_are_reported_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "d.parquet"
    path.write_bytes(b"PAR1")
    with pytest.raises(UserError, match=r"d\.parquet cannot be read as Parquet"):
        read_questions(path, training=True)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(UserError, match=r"needs pyarrow: pip install 'stoker\[parquet\]'"):
        read_questions(path, training=True)


def test_unanswerable_questions_keep_no_answer(tmp_path: Path) -> None:
    entry = {"id": "x", "question": "Who?", "answers": [], "is_impossible": True, "plausible_answers": [{"text": "Bo"}]}
    content = {"data": [{"paragraphs": [{"context": CONTEXT, "qas": [entry]}]}]}
    (question,) = read_questions(write(tmp_path / "v2.json", json.dumps(content)), training=True)
    assert question.answers == ()


def rows_with(bad: dict[str, Any], good: int) -> str:
    rows = [{**flat(QUESTIONS)[0], "id": str(number)} for number in range(good)]
    rows.insert(2, {**flat(QUESTIONS)[0], "id": "bad", **bad})
    return "\n".join(json.dumps(row) for row in rows)


BAD = {
    "answer not at its offset": (
        {"answers": {"text": ["Ada"], "answer_start": [4]}},
        "answer 'Ada' is not at its offset 4",
    ),
    "negative offset": ({"answers": {"text": ["it."], "answer_start": [-3]}}, "is not at its offset -3"),
    "empty question": ({"question": " "}, "its question is empty"),
    "context of another type": ({"context": 3}, "its context is an int, not text"),
    "more answers than offsets": ({"answers": {"text": ["Ada", "Bo"], "answer_start": [0]}}, "2 answers but 1 offsets"),
    "half a character": ({"question": "\ud800 who?"}, "its question contains a lone surrogate"),
    "half a character in an answer": ({"answers": {"text": ["\udfff"], "answer_start": [0]}}, "is empty or not text"),
    "an offset without end": (
        {"answers": {"text": ["Ada"], "answer_start": [1e400]}},
        "one of its offsets is not a number",
    ),
    "a repeated id": ({"id": "0"}, "the id '0' has been used before"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_few_bad_rows_are_skipped_and_reported_with_their_position(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    change, message = BAD[name]
    path = write(tmp_path / "d.jsonl", rows_with(change, 150))
    with caplog.at_level("WARNING", logger="stoker"):
        assert len(read_questions(path, training=True)) == 150
    assert f"{path}, line 3" in caplog.text
    assert message in caplog.text


def test_an_unusual_value_of_is_impossible_does_not_crash(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", rows_with({"is_impossible": ["?"]}, 3))
    assert all(question.answers for question in read_questions(path, training=True))


def test_more_than_one_percent_of_bad_rows_stops_before_training(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", rows_with({"question": ""}, 50))
    with pytest.raises(UserError, match=r"1 of 51 rows .* cannot be used, more than 1%"):
        read_questions(path, training=True)


def test_strict_stops_at_the_first_bad_row(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", rows_with({"question": ""}, 500))
    with pytest.raises(UserError, match=r"line 3: its question is empty .*--strict"):
        read_questions(path, training=True, strict=True)


def test_a_wrong_offset_does_not_matter_for_evaluation(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", rows_with(BAD["answer not at its offset"][0], 10))
    assert len(read_questions(path, training=False)) == 11


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("d.json", b'{"data": [', "is not JSON: .* line 1, column 11"),
        ("d.json", '{"data": "é"}'.encode("latin-1"), "is not UTF-8: byte 10 is 0xe9"),
        ("d.json", b'{"rows": []}', "neither a list of rows"),
        ("d.json.gz", b"not gzip", "it is not a whole gzip file"),
        ("d.txt", b"", "has an unknown format"),
        ("d.csv", b"", "is empty; its first line must name the columns"),
        ("d.csv", "question,context\n".encode("utf-16"), "is not UTF-8: its first line cannot be read"),
        ("d.json", b'{"data": []}', "contains no questions"),
        ("d.json", b"[" * 100_000, "is nested too deeply"),
        ("d.jsonl", b'{"question": "Who?"}\n', "has no column 'context'; its columns are question"),
    ],
)
def test_a_file_that_cannot_be_read_is_reported_in_one_sentence(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_questions(path, training=True)


def test_rows_in_a_wrong_encoding_are_counted_in_lines_and_tables(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines = [json.dumps({**flat(QUESTIONS)[0], "id": str(n)}).encode() for n in range(150)]
    lines[7] = lines[7].replace(b"Ada wrote", b"Ad\xe9 wrote")
    path = write(tmp_path / "d.jsonl", b"\n".join(lines))
    with caplog.at_level("WARNING", logger="stoker"):
        assert len(read_questions(path, training=True)) == 149
    assert "line 8: is not UTF-8" in caplog.text


def test_a_missing_file_is_reported_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        read_questions(tmp_path / "none.json", training=True)


@pytest.mark.data
def test_the_real_squad_is_read_completely(data: Path) -> None:
    dev = read_questions(data / "squad" / "dev-v1.1.json.gz", training=True)
    assert len(dev) == 10570
    assert dev[0].answers[0] == "Denver Broncos"
