"""Windows and labels are those that the tokenizer itself makes of (question, context) pairs."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers

from stoker.errors import UserError
from stoker.tasks.collate import Collator
from stoker.tasks.demo.world import make_world
from stoker.tasks.loading import row_length
from stoker.tasks.qa.data import Question, read_questions
from stoker.tasks.qa.features import make_windows
from tasks.models import byte_level, wordpiece

TOKENIZERS = {"wordpiece": wordpiece, "byte level": byte_level}


def reference(question: Question, tokenizer: Any, length: int, stride: int) -> list[dict[str, Any]]:
    """The usual recipe, by the tokenizer's own truncation; labels by looking at every token."""
    left = tokenizer.padding_side == "left"
    pair = (question.context, question.question) if left else (question.question, question.context)
    found = tokenizer(
        *pair, truncation="only_first" if left else "only_second", max_length=length, stride=stride,
        return_overflowing_tokens=True, return_offsets_mapping=True, padding=False,
    )  # fmt: skip
    windows = []
    for row, ids in enumerate(found["input_ids"]):
        owner = found.sequence_ids(row)
        spans = found["offset_mapping"][row]
        context = [i for i, one in enumerate(owner) if one == (0 if left else 1)]
        cls = ids.index(tokenizer.cls_token_id)
        begin = question.starts[0] if question.starts else -1
        end = begin + len(question.answers[0]) if question.starts else -1
        label = (cls, cls)
        if question.starts and spans[context[0]][0] <= begin and spans[context[-1]][1] >= end:
            label = (
                max(i for i in context if spans[i][0] <= begin),
                min(i for i in context if spans[i][1] >= end),
            )
        types = found["token_type_ids"][row] if "token_type_ids" in found else None
        windows.append(
            {"ids": ids, "types": types, "label": label, "spans": [spans[i] for i in context], "at": context[0]}
        )
    return windows


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize(("length", "stride"), [(384, 128), (48, 16), (40, 0)])
@pytest.mark.parametrize("side", ["right", "left"])
def test_windows_and_labels_are_those_of_the_tokenizer(kind: str, length: int, stride: int, side: str) -> None:
    tokenizer = TOKENIZERS[kind]()
    if kind == "byte level" and length < 384:
        length, stride = 3 * length, 3 * stride  # its words are longer
    before, tokenizer.padding_side = tokenizer.padding_side, side
    try:
        questions = make_world(30, seed=3, training=True)
        questions.append(
            Question("none", "Where  was the café?", questions[0].context + " Ünïcode café 東京 end", (), ())
        )
        windows = make_windows(questions, tokenizer, max_seq_length=length, doc_stride=stride, training=True)
        expected = [(q, window) for q in questions for window in reference(q, tokenizer, length, stride)]
        assert len(windows) == len(expected)
        for index, (question, window) in enumerate(expected):
            item = windows[index]
            assert item["input_ids"].tolist() == window["ids"]
            if window["types"] is not None:
                assert item["token_type_ids"].tolist() == window["types"]
            assert (item["start_positions"], item["end_positions"]) == window["label"], question
            at, spans = windows.context_of(index)
            assert at == window["at"]
            found = [tuple(span) for span in spans.tolist()]
            assert found[1:] == window["spans"][1:]
            # A byte-level tokenizer trims the space before a window's first token in a way of its own.
            assert abs(found[0][0] - window["spans"][0][0]) <= (kind == "byte level")
            assert windows.lengths[index] == len(window["ids"])
    finally:
        tokenizer.padding_side = before


def test_the_cache_returns_what_was_stored() -> None:
    questions = make_world(8, seed=int(random.random() * 1e9), training=True)
    made = [make_windows(questions, wordpiece(), max_seq_length=96, doc_stride=16, training=True) for _ in range(2)]
    for index in range(len(made[0])):
        assert all((made[0][index][name] == made[1][index][name]).all() for name in ("input_ids", "token_type_ids"))


def test_a_question_longer_than_the_window_is_reported_with_advice() -> None:
    question = Question("long-one", "Why " * 60 + "?", "Because.", ("Because",), (0,))
    with pytest.raises(UserError, match=r"question 'long-one' has 61 tokens.*--max_seq_length \d+ or more"):
        make_windows([question], wordpiece(), max_seq_length=64, doc_stride=16, training=True)


@pytest.mark.parametrize("left", [False, True])
def test_a_batch_contains_every_row_and_masks_the_padding(left: bool) -> None:
    questions = make_world(5, seed=2, training=True)
    windows = make_windows(questions, wordpiece(), max_seq_length=160, doc_stride=32, training=True)
    items = [windows[i] for i in range(5)]
    batch = Collator(pad_id=0, pad_left=left)(items)
    for row, item in enumerate(items):
        real = batch["attention_mask"][row].bool()
        assert batch["input_ids"][row][real].tolist() == item["input_ids"].tolist()
        assert int(real.sum()) == len(item["input_ids"])
        start = int(batch["start_positions"][row])
        assert batch["input_ids"][row][start] == item["input_ids"][item["start_positions"]]
    assert Collator(pad_id=0, pad_to=160)(items)["input_ids"].shape == (5, 160)


@pytest.mark.data
def test_windows_of_real_paragraphs_are_those_of_the_tokenizer(data: Path) -> None:
    questions = read_questions(data / "squad" / "dev-v1.1.json.gz", training=True)[:10570:150]
    windows = make_windows(questions, wordpiece(), max_seq_length=128, doc_stride=48, training=True)
    expected = [window for q in questions for window in reference(q, wordpiece(), 128, 48)]
    assert len(windows) == len(expected)
    for index, window in enumerate(expected):
        assert windows[index]["input_ids"].tolist() == window["ids"]
        assert tuple(windows.labels[index].tolist()) == window["label"]


def test_rows_are_no_longer_than_the_model_has_positions(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = SimpleNamespace(model_max_length=int(1e30))
    roberta = transformers.RobertaConfig(max_position_embeddings=514, pad_token_id=1)
    assert row_length(600, tokenizer, roberta) == 512
    assert "--max_seq_length 600 is more than the model takes; 512 is used" in caplog.text
    assert row_length(600, tokenizer, transformers.BertConfig(max_position_embeddings=512)) == 512
    assert row_length(128, tokenizer, transformers.BertConfig(max_position_embeddings=512)) == 128
    with pytest.raises(UserError, match="--max_seq_length 2 leaves no room"):
        row_length(2, tokenizer, roberta)
