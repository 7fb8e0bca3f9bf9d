"""`stoker use`: each kind of model is recognised, and gives what the stock libraries compute with it."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from stoker.cli import main
from stoker.tasks.use.model_kind import model_kind
from tasks.models import wordpiece

TEXTS = ["A cat sits on the mat.", "The stock market fell on Monday.", "Kittens play with wool.", "Rain is expected."]
HEADS = {
    "classify": (transformers.BertForSequenceClassification, {"id2label": {0: "no", 1: "yes", 2: "maybe"}}),
    "tag": (transformers.BertForTokenClassification, {"id2label": {0: "O", 1: "B-PER", 2: "I-PER", 3: "B-LOC"}}),
    "fill": (transformers.BertForMaskedLM, {}),
    "answer": (transformers.BertForQuestionAnswering, {}),
    "embed": (transformers.BertModel, {}),
}


def save(kind: str, folder: Path) -> Path:
    torch.manual_seed(0)
    head, labels = HEADS[kind]
    config = transformers.BertConfig(
        vocab_size=30522, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=128, **labels,
    )  # fmt: skip
    head(config).save_pretrained(folder)
    wordpiece().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    from sentence_transformers import CrossEncoder

    root = tmp_path_factory.mktemp("models")
    found = {kind: save(kind, root / kind) for kind in HEADS}
    for name, labels in (("rerank", 1), ("pairs", 3)):
        CrossEncoder(str(found["embed"]), num_labels=labels, device="cpu").save_pretrained(str(root / name))
        found[name] = root / name
    return found


def used(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    assert main(["use", *words, "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize("kind", [*HEADS, "rerank", "pairs"])
def test_the_kind_of_a_model_follows_from_its_folder(kind: str, models: dict[str, Path]) -> None:
    assert model_kind(str(models[kind])) == {"pairs": "classify"}.get(kind, kind)


@pytest.mark.parametrize("kind", ["classify", "pairs"])
@pytest.mark.parametrize("between", ["\t", r"\t"], ids=["tab", "as typed in double quotes"])
def test_classifying_gives_the_probabilities_of_the_stock_model(
    kind: str, between: str, models: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = models[kind]
    (found,) = used(capsys, "--model", str(folder), "--text", f"One sentence.{between}Another one.")
    stock = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        expected = stock(**wordpiece()("One sentence.", "Another one.", return_tensors="pt")).logits.softmax(-1)[0]
    scores = {row["label"]: row["score"] for row in found["found"]}
    assert scores == {name: pytest.approx(float(expected[i]), abs=1e-4) for i, name in stock.config.id2label.items()}
    assert list(scores.values()) == sorted(scores.values(), reverse=True)


def test_tagging_finds_what_the_stock_pipeline_finds_also_in_a_text_longer_than_the_model_takes(
    models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = "Ada met Grace in Torwick near the old river. " * 40
    (tmp_path / "texts.txt").write_text(f"Ada met Grace.\n\n{long}\n")
    short, windows = used(capsys, "--model", str(models["tag"]), "--file", str(tmp_path / "texts.txt"))
    stock = transformers.pipeline(
        "token-classification", model=str(models["tag"]), tokenizer=wordpiece(), aggregation_strategy="first"
    )
    expected = [(one["entity_group"], one["start"], one["end"]) for one in stock("Ada met Grace.")]
    assert [(row["label"], row["begin"], row["end"]) for row in short["found"]] == expected
    assert max(row["end"] for row in windows["found"]) > 1000  # beyond the first window of 128 tokens
    assert all(row["text"] == windows["input"][row["begin"] : row["end"]] for row in windows["found"])


def test_masked_words_are_filled(models: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = used(capsys, "--model", str(models["fill"]), "--text", "A [MASK] on the [MASK].", "--top", "2")
    assert [row["mask"] for row in found["found"]] == [1, 1, 2, 2]
    assert main(["use", "--model", str(models["fill"]), "--text", "no mask here"]) == 2
    assert "write [MASK] in its place" in capsys.readouterr().err


def test_searching_orders_texts_by_the_similarity_that_sentence_transformers_computes(
    models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from sentence_transformers import CrossEncoder, SentenceTransformer

    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    words = ["--file", str(tmp_path / "texts.txt"), "--query", "a small cat", "--top", "3"]
    (found,) = used(capsys, "--model", str(models["embed"]), *words)
    stock = SentenceTransformer(str(models["embed"]), device="cpu")
    best = stock.similarity(stock.encode("a small cat"), stock.encode(TEXTS))[0].topk(3)
    assert [row["number"] - 1 for row in found["found"]] == best.indices.tolist()
    assert [row["score"] for row in found["found"]] == pytest.approx(best.values.tolist(), abs=1e-3)
    (found,) = used(capsys, "--model", str(models["rerank"]), *words)
    ranked = CrossEncoder(str(models["rerank"]), device="cpu").rank("a small cat", TEXTS, top_k=3)
    assert [row["number"] - 1 for row in found["found"]] == [one["corpus_id"] for one in ranked]
    assert [row["text"] for row in found["found"]] == [TEXTS[one["corpus_id"]] for one in ranked]


def test_lines_from_standard_input_are_answered_one_by_one(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("First text.\n\nSecond text.\n \nThird text."))
    found = [row["input"] for row in used(capsys, "--model", str(models["classify"]))]
    assert found == ["First text.", "Second text.", "Third text."]


def test_a_mistake_does_not_end_a_conversation(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("sys.stdin", Terminal("no mask\na [MASK] here\n\n"))
    assert main(["use", "--model", str(models["fill"]), "--top", "1"]) == 0
    assert (
        "the text 'no mask' has no masked word; write [MASK] in its place\ntext with [MASK]: 0."
        in capsys.readouterr().out
    )


def test_a_question_goes_to_a_model_that_answers(models: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = used(capsys, "--model", str(models["answer"]), "--text", "Ada wrote it.", "--query", "Who wrote it?")
    assert found["question"] == "Who wrote it?"


@pytest.mark.parametrize(
    ("kind", "words", "message"),
    [
        ("embed", ["--query", "q"], "--file is missing: it contains the texts to search"),
        ("embed", ["--text", " ", "--query", "q"], "--text is empty"),
        ("rerank", ["--file", "nowhere.txt", "--query", "q"], "nowhere.txt"),
        ("classify", ["--text", "a", "--query", "q"], "--query is for models that search texts"),
        ("embed", ["--file", "-"], "add --query, which cannot be prompted for"),
    ],
)
def test_what_does_not_fit_the_model_gets_one_sentence(
    kind: str, words: list[str], message: str, models: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["use", "--model", str(models[kind]), *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "words", "message"),
    [
        ("embed", ["--text", "x"], "this model searches texts, and was given no query; give one with --query"),
        ("classify", [], "there is no text; give one with --text"),
    ],
)
def test_nothing_to_do_is_not_a_success(
    kind: str, words: list[str], message: str, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
    assert main(["use", "--model", str(models[kind]), *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "classify",
            "is not a language model: it is a BertForSequenceClassification, which classifies texts; use it with",
        ),
        ("fill", "is not a language model: it is a BertForMaskedLM, which fills the masked words of a text"),
        ("answer", "is not a language model: it is a BertForQuestionAnswering"),
        ("embed", "is not a language model: it has no cls.predictions."),
    ],
)
def test_chat_refuses_a_model_that_is_no_language_model(
    kind: str, message: str, models: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chat", "--model", str(models[kind]), "--prompt", "Hello", "--max_new_tokens", "2"]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert f"`stoker use --model {models[kind]}`" in printed.err
    assert printed.out == ""


def test_a_folder_without_a_model_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["use", "--model", str(tmp_path), "--text", "a"]) == 2
    assert "does not contain a model: it has no config.json" in capsys.readouterr().err
