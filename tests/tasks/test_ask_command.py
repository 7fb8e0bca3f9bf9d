"""`stoker ask`: texts that are not UTF-8, models with few positions, and questions without an answer."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from rich.console import Console

from stoker.cli import main
from stoker.tasks.qa.question_answerer import QuestionAnswerer, show
from tasks.models import wordpiece

TEXT = "Torwick was founded by Elusa Halostone. The Ane flows through it. " * 12


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 64 positions whose tokenizer does not know it."""
    folder = tmp_path_factory.mktemp("short")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=30522, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=64,
    )  # fmt: skip
    transformers.BertForQuestionAnswering(config).save_pretrained(folder)
    wordpiece().save_pretrained(folder)
    return folder


def test_a_model_with_few_positions_reads_a_long_text_in_windows(
    short: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ask", "--model", str(short), "--text", TEXT, "--question", "Who founded Torwick?"]) == 0
    assert "score" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words", [["--text", "Ada \udce9", "--question", "Who?"], ["--text", "Ada", "--question", "\udce9"]]
)
def test_arguments_that_are_not_utf8_are_reported_in_one_sentence(
    short: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ask", "--model", str(short), *words]) == 2
    assert "is not UTF-8 text" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--file", "-", "--question", "Who?"], ["--text", "Ada wrote it."]])
def test_standard_input_that_is_not_utf8_is_reported_in_one_sentence(
    short: Path, words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"Who wrote \xe9t\xe9?\n"), encoding="utf-8"))
    assert main(["ask", "--model", str(short), *words]) == 2
    assert "is not UTF-8 text" in capsys.readouterr().err


@pytest.mark.parametrize("no_answer", [False, True])
def test_no_answer_is_shown_if_no_pair_of_tokens_is_valid(no_answer: bool) -> None:
    def only_the_question(input_ids: torch.Tensor, **rest: Any) -> Any:
        """Prefers the first tokens, which are the question's, by far."""
        logits = -torch.arange(input_ids.shape[1], dtype=torch.float32).expand(input_ids.shape)
        return SimpleNamespace(start_logits=logits - 1, end_logits=logits - 1)

    answerer = QuestionAnswerer(only_the_question, wordpiece(), 96, 16)
    answer = answerer.ask("Who " * 30 + "founded Torwick?", "Elusa Halostone.", no_answer=no_answer)
    assert (answer.text, answer.chosen.end) == ("", 0)
    console = Console(file=io.StringIO())
    show(console, answer, "Elusa Halostone.")
    message = console.file.getvalue()  # type: ignore[attr-defined]
    assert message == "no answer found\n"
