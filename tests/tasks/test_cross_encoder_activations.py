"""A cross-encoder's files choose among PyTorch's activations, and nothing else of what they name is called."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("sentence_transformers", reason="needs the extra embed")

from stoker.cli import main

TEXTS = ["A cat sits on the mat.", "The stock market fell on Monday.", "Rain is expected."]
PLACES = {
    "config_sentence_transformers.json": lambda name: {"activation_fn": name},
    "config.json": lambda name: {"sentence_transformers": {"activation_fn": name}},
    "config.json of old releases": lambda name: {"sbert_ce_default_activation_function": name},
}


@pytest.fixture(scope="module")
def reranker(bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from sentence_transformers import CrossEncoder

    folder = tmp_path_factory.mktemp("reranker") / "saved"
    CrossEncoder(str(bert), num_labels=1, device="cpu").save_pretrained(str(folder))
    return folder


def naming(reranker: Path, copy: Path, place: str, name: Any) -> Path:
    """A copy of the folder that names its activation in one place."""
    shutil.copytree(reranker, copy)
    for file in ("config_sentence_transformers.json", "config.json"):
        content = json.loads((copy / file).read_text())
        content.pop("activation_fn", None)
        content.pop("sentence_transformers", None)
        if place.startswith(file):
            content |= PLACES[place](name)
        (copy / file).write_text(json.dumps(content))
    return copy


def used(folder: Path, tmp_path: Path) -> int:
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    words = ["--file", str(tmp_path / "texts.txt"), "--query", "a cat", "--as", "rerank", "--json"]
    return main(["use", "--model", str(folder), *words])


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "name", ["torch.seed", "torch.nn.Transformer", "torch.nn.functional.sigmoid", "torch.x.Sigmoid"]
)
def test_a_callable_that_is_no_activation_is_refused_and_not_called(
    place: str, name: str, reranker: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(7)
    folder = naming(reranker, tmp_path / "model", place, name)
    assert used(folder, tmp_path) == 2
    assert torch.initial_seed() == 7, "torch.seed was called"
    assert f"is {name!r}, which is not an activation of torch.nn" in capsys.readouterr().err


def test_training_refuses_such_a_callable_too(
    reranker: Path, files: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = naming(reranker, tmp_path / "model", "config.json", "torch.seed")
    words = [
        "--model_name_or_path",
        str(folder),
        "--train_file",
        str(files["pairs"]),
        "--output_dir",
        str(tmp_path / "out"),
    ]
    assert main(["train", "rerank", *words, "--seed", "7"]) == 2
    assert torch.initial_seed() == 7, "torch.seed was called"
    assert "is not an activation of torch.nn" in capsys.readouterr().err


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["torch.nn.Tanh", "torch.nn.modules.linear.Identity", None])
def test_scores_are_those_of_stock_sentence_transformers(
    place: str, name: str | None, reranker: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from sentence_transformers import CrossEncoder

    folder = naming(reranker, tmp_path / "model", place, name)
    assert used(folder, tmp_path) == 0
    found = {row["number"] - 1: row["score"] for row in json.loads(capsys.readouterr().out)["found"]}
    stock = CrossEncoder(str(folder), device="cpu").predict([("a cat", text) for text in TEXTS])
    assert found == {n: pytest.approx(float(score), abs=1e-4) for n, score in enumerate(stock)}
