"""Messages with values in them are grammatical."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import stoker
from stoker.english import counted, with_article


@pytest.mark.parametrize(
    "expected",
    [
        "an Embedding", "a BertLayer", "an XLNetLayer", "a UMT5Block", "an int", "a str", "an LSTM", "a T5Block",
        "an RMSNorm", "a RobertaLayer", "a UniLM", "an Unpooler", "a NoneType",
    ],
)  # fmt: skip
def test_the_article_follows_the_sound(expected: str) -> None:
    assert with_article(expected.partition(" ")[2]) == expected


def test_nouns_follow_their_number() -> None:
    assert [counted(1, "process"), counted(2, "process"), counted(0, "core")] == ["1 process", "2 processes", "0 cores"]


def test_no_message_puts_a_fixed_article_before_the_name_of_a_class() -> None:
    source = Path(stoker.__file__).parent
    found = [
        f"{path.relative_to(source)}: {match[0]}"
        for path in source.rglob("*.py")
        for match in re.finditer(r"\b[Aa]n? \{[^}]*__name__\}", path.read_text(encoding="utf-8"))
    ]
    assert found == []


def test_a_message_about_a_wrong_model_uses_the_right_article() -> None:
    with pytest.raises(TypeError, match="model is an int;"):
        stoker.optimize(1)
