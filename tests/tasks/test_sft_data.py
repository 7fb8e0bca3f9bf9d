"""Formats of training data for language models, and which tokens of them are trained on."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from stoker.errors import UserError
from stoker.tasks.faults import Faults
from stoker.tasks.sft.chat_template import DEFAULT_TEMPLATE, ensure_template, marking_template, render
from stoker.tasks.sft.data import Chat, Example, Pair, Plain, read_examples
from stoker.tasks.sft.features import IGNORED, Encoder, make_pairs, make_rows
from tasks.language_models import CHATML, chat, tokenizer, write_lines

TURNS = chat(3)
ROWS: dict[str, tuple[dict[str, Any], Any]] = {
    "chat messages": ({"messages": TURNS}, Chat(TURNS)),
    "ShareGPT conversations": (
        {"conversations": [{"from": "human", "value": TURNS[0]["content"]}, {"from": "gpt", "value": TURNS[1]["content"]}]},
        Chat(TURNS),
    ),
    "prompts and completions": ({"prompt": "One, ", "completion": "two"}, Plain("One, ", "two")),
    "Alpaca instructions": (
        {"instruction": "Add.", "input": "1 and 2", "output": "3"},
        Chat([{"role": "user", "content": "Add.\n\n1 and 2"}, {"role": "assistant", "content": "3"}]),
    ),
    "plain text": ({"text": "Once upon a time."}, Plain("", "Once upon a time.")),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("suffix", ["json", "jsonl", "parquet", "csv"])
def test_the_columns_tell_the_format(name: str, suffix: str, tmp_path: Path) -> None:
    row, expected = ROWS[name]
    path = tmp_path / f"rows.{suffix}"
    if suffix == "json":
        path.write_text(json.dumps([row, row]))
    elif suffix == "jsonl":
        write_lines(path, [row, row])
    elif suffix == "parquet":
        pytest.importorskip("pyarrow")
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row, row]), path)
    else:
        import csv

        with open(path, "w", newline="") as file:
            table = csv.DictWriter(file, list(row))
            table.writeheader()
            table.writerows([{k: v if isinstance(v, str) else json.dumps(v) for k, v in row.items()}] * 2)
    form, examples, faults = read_examples(path, pairs=False)
    assert (form.name, faults.count) == (name, 0)
    assert [example.content for example in examples] == [expected] * 2


@pytest.mark.parametrize("separator", [";", "\t"])
def test_a_csv_file_may_have_other_separators(separator: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(separator.join(("prompt", "completion")) + "\n" + separator.join(("One, two?", "Three.")) + "\n")
    _, examples, faults = read_examples(path, pairs=False)
    assert faults.count == 0
    assert [example.content for example in examples] == [Plain("One, two?", "Three.")]


def test_a_text_file_has_a_row_for_each_paragraph(tmp_path: Path) -> None:
    path = tmp_path / "story.txt"
    path.write_text("\nOne\ntwo.\n\n\nThree.\n")
    form, examples, _ = read_examples(path, pairs=False)
    assert form.name == "plain text"
    assert [example.content for example in examples] == [Plain("", "One\ntwo."), Plain("", "Three.")]
    assert [example.where.rpartition(" ")[2] for example in examples] == ["2", "6"]


PAIRS: list[dict[str, Any]] = [
    {"conversations": [{"from": "human", "value": "Hi"}], "chosen": {"from": "gpt", "value": "Hello"},
     "rejected": {"from": "gpt", "value": "No"}},
    {"prompt": [{"role": "user", "content": "Hi"}], "chosen": [{"role": "assistant", "content": "Hello"}],
     "rejected": [{"role": "assistant", "content": "No"}]},
    {"chosen": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}],
     "rejected": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "No"}]},
]  # fmt: skip


@pytest.mark.parametrize("row", PAIRS, ids=["LLaMA-Factory", "prompt and messages", "whole chats"])
def test_preference_pairs_are_read_in_every_usual_form(row: dict[str, Any], tmp_path: Path) -> None:
    _, examples, _ = read_examples(write_lines(tmp_path / "pairs.jsonl", [row]), pairs=True)
    hi = {"role": "user", "content": "Hi"}
    both = [Chat([hi, {"role": "assistant", "content": text}]) for text in ("Hello", "No")]
    assert examples[0].content == Pair(*both)


def test_plain_preference_pairs_keep_their_prompt(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "pairs.jsonl", [{"prompt": "a", "chosen": "b", "rejected": "c"}])
    assert read_examples(path, pairs=True)[1][0].content == Pair(Plain("a", "b"), Plain("a", "c"))


BAD: dict[str, Any] = {
    "its messages is empty": {"messages": []},
    "its messages is missing": {"messages": None},
    "turn 1 has the role 'human'; known are system": {"messages": [{"role": "human", "content": "x"}]},
    "its content of turn 1 is empty": {"messages": [{"role": "user", "content": " "}]},
    "its content of turn 2 is an int, not text": {"messages": [TURNS[0], {"role": "assistant", "content": 5}]},
    "turn 1 is a str, not an object": {"messages": ["x"]},
    "it has no turn of the assistant": {"messages": TURNS[:1]},
    "no turn of the user comes before": {"messages": TURNS[1:]},
    "turn 1 has a part that is not text": {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
    "contains a lone surrogate": {"messages": [{"role": "user", "content": "\ud800"}, TURNS[1]]},
}


@pytest.mark.parametrize("reason", BAD)
def test_a_bad_row_is_named_with_its_line_and_the_reason(reason: str, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "rows.jsonl", [{"messages": TURNS}, BAD[reason]])
    _, examples, faults = read_examples(path, pairs=False)
    assert len(examples) == 1
    assert faults.shown[0].startswith(f"{path}, line 2: ")
    assert reason in faults.shown[0]
    with pytest.raises(UserError, match="1 of 2 rows"):
        faults.settle(1)


@pytest.mark.parametrize("rejected", [[{"role": "user", "content": "Another question?"}, TURNS[1]], [*TURNS, *TURNS]])
def test_a_pair_that_does_not_answer_the_same_turns_is_a_bad_row(rejected: Any, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "rows.jsonl", [{"chosen": TURNS, "rejected": rejected}])
    _, examples, faults = read_examples(path, pairs=True)
    assert examples == []
    assert "chosen and rejected differ before the last answer" in faults.shown[0]


def test_turns_after_the_last_answer_are_left_out(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "rows.jsonl", [{"messages": [*TURNS, TURNS[0]]}])
    assert read_examples(path, pairs=False)[1][0].content == Chat(TURNS)


def test_unknown_columns_are_answered_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"its columns are question, and one of these is needed: messages; conve.*; rename its columns"
    ):
        read_examples(write_lines(tmp_path / "rows.jsonl", [{"question": "x"}]), pairs=False)
    with pytest.raises(UserError, match="add --dpo"):
        read_examples(write_lines(tmp_path / "pairs.jsonl", [PAIRS[0]]), pairs=False)


def trained_texts(encoder: Encoder, content: Chat | Plain) -> list[str]:
    """The text of each run of tokens with a label; the labels are compared with the tokens."""
    tokens = encoder(content)
    assert len(tokens.ids) == len(tokens.labels)
    runs: list[list[int]] = [[]]
    for one, label in zip(tokens.ids, tokens.labels, strict=True):
        assert label in (one, IGNORED)
        if label == IGNORED:
            runs.append([])
        else:
            runs[-1].append(one)
    return [encoder.tokenizer.decode(run) for run in runs if run]


MARKED = CHATML.replace(
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}",
    "{{ '<|im_start|>' + message.role + '\\n' }}{% if message.role == 'assistant' %}{% generation %}"
    "{{ message.content + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}{% else %}"
    "{{ message.content + '<|im_end|>' + '\\n' }}{% endif %}",
)
TWO = Chat([{"role": "system", "content": "Be brief."}, *chat(2, turns=2)])
ANSWERS = ["It is blue.<|im_end|>", "It is grey.<|im_end|>"]


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["plain template", "marked template"])
def test_loss_on_assistant_completions_and_all(template: str) -> None:
    words = tokenizer(template)
    text = render(words, TWO.messages)
    expected = {"assistant": ANSWERS, "completions": ANSWERS[1:], "all": [text]}
    for loss_on, texts in expected.items():
        encoder = Encoder.of(words, loss_on, chats=True)
        assert (encoder.marking is not None) == (template == MARKED and loss_on != "all")
        assert trained_texts(encoder, TWO) == texts
        assert encoder(TWO).ids == words(text, add_special_tokens=False)["input_ids"]


def test_only_the_completion_of_a_plain_prompt_is_trained_on() -> None:
    words = tokenizer(None)
    assert trained_texts(Encoder.of(words, "completions", chats=False), Plain("It is", " red")) == [" red<|end|>"]
    assert trained_texts(Encoder.of(words, "all", chats=False), Plain("It is", " red")) == ["It is red<|end|>"]


def test_a_template_that_rewrites_earlier_turns_needs_marks() -> None:
    words = tokenizer(CHATML.replace("{{ '<|im_start|>'", "{{ loop.length | string + '<|im_start|>'"))
    with pytest.raises(UserError, match="it rewrites earlier turns"):
        marking_template(words, last_only=False)
    assert Encoder.of(words, "all", chats=True).marking is None


def test_a_tokenizer_without_a_template_gets_one_that_says_where_answers_end(caplog: pytest.LogCaptureFixture) -> None:
    words = tokenizer(None)
    logging.getLogger("stoker").propagate = True
    with caplog.at_level(logging.WARNING, logger="stoker"):
        ensure_template(words, "out/base")
    assert "has no chat template" in caplog.text
    assert words.chat_template == DEFAULT_TEMPLATE
    assert render(words, TURNS) == "### User:\nWhich colour has thing 3?\n\n### Assistant:\nIt is grey.<|end|>\n"
    assert trained_texts(Encoder.of(words, "assistant", chats=True), Chat(TURNS)) == ["It is grey.<|end|>"]


def test_a_template_that_rejects_turns_makes_a_bad_row() -> None:
    words = tokenizer("{{ raise_exception('roles must alternate') }}")
    faults = Faults("f")
    assert make_rows([Example("f, line 1", Chat(TURNS))], Encoder(words, "all", None), 64, faults) == []
    assert "the chat template rejects it: roles must alternate" in faults.shown[0]


def test_long_rows_are_cut_or_skipped_and_reported_by_line(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("stoker").propagate = True
    long_answer = Chat([TURNS[0], {"role": "assistant", "content": "red " * 90}])
    long_prompt = Chat([{"role": "user", "content": "why " * 90}, TURNS[1]])
    examples = [Example(f"line {n}", one) for n, one in enumerate((Chat(TURNS), long_answer, long_prompt), 1)]
    encoder = Encoder.of(tokenizer(), "assistant", chats=True)
    with caplog.at_level(logging.WARNING, logger="stoker"):
        rows = make_rows(examples, encoder, 60, Faults("f"))
    assert [len(row.ids) for row in rows] == [len(encoder(Chat(TURNS)).ids), 60]
    assert "1 of 3 rows have more tokens than --max_length 60, and are cut there: line 2" in caplog.text
    assert "1 of 3 rows are skipped, because their prompt alone fills --max_length 60: line 3" in caplog.text
    with pytest.raises(UserError, match="line 3: its prompt alone fills"):
        make_rows(examples, encoder, 60, Faults("f", strict=True))
    assert make_pairs([Example("line 1", Pair(long_prompt, long_prompt))], encoder, 60, Faults("f")) == []


def test_long_texts_continue_in_the_next_row() -> None:
    words = tokenizer(None)
    encoder = Encoder.of(words, "all", chats=False)
    text = Plain("", "It is red. " * 20)
    rows = make_rows([Example("line 1", text)], encoder, 50, Faults("f"))
    assert [one for row in rows for one in row.ids] == encoder(text).ids
    assert max(len(row.ids) for row in rows) == 50
