"""What is said about a model that cannot be found, or whose parts are broken, names the folder and the file."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from stoker.cli import main
from stoker.errors import UserError
from stoker.tasks.loading import config_of


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.mark.parametrize(
    "name", ["./mymodel", "../mymodel", "/no/mymodel", "~/mymodel", "mymodel/", "runs/old/mymodel"]
)
def test_a_mistyped_folder_is_reported_as_one(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ask", "--model", name, "--text", "Ada wrote it.", "--question", "Who?"]) == 2
    error = capsys.readouterr().err
    assert error == f"stoker: the folder {name} does not exist (--model)\n"


def test_a_name_in_an_existing_folder_is_a_folder_that_does_not_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        UserError, match=r"^the folder runs/mymodel does not exist, and it cannot be loaded from the hub"
    ):
        config_of("runs/mymodel", flag="--model")
    with pytest.raises(
        UserError, match=r"^the model 'owner/mymodel' is not a local folder and cannot be loaded from the hub"
    ):
        config_of("owner/mymodel", flag="--model")


def test_a_name_that_no_model_can_have_is_reported_without_jargon() -> None:
    with pytest.raises(
        UserError, match=r"^the folder 'my model' does not exist, and no model on the hub can have that name"
    ):
        config_of("my model", flag="--model")


@pytest.fixture(scope="module")
def embedder(bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In the layout of early releases, which still is that of most models: every part in a folder of its own."""
    models = pytest.importorskip("sentence_transformers.models", reason="needs the extra embed")
    from sentence_transformers import SentenceTransformer

    folder = tmp_path_factory.mktemp("embedder") / "saved"
    first = models.Transformer(str(bert))
    SentenceTransformer(modules=[first, models.Pooling(32)], device="cpu").save_pretrained(str(folder))
    (folder / "0_Transformer").mkdir()
    for path in [one for one in folder.iterdir() if one.is_file() and one.name not in ("modules.json", "README.md")]:
        if path.name != "config_sentence_transformers.json":
            path.rename(folder / "0_Transformer" / path.name)
    listed = (folder / "modules.json").read_text()
    (folder / "modules.json").write_text(listed.replace('"path": ""', '"path": "0_Transformer"'))
    return folder


PARTS = {
    "0_Transformer/config.json is not JSON": lambda folder: (folder / "0_Transformer" / "config.json").write_text("{"),
    "0_Transformer/model.safetensors is damaged": lambda folder: (
        (folder / "0_Transformer" / "model.safetensors").write_bytes(b"x" * 99)
    ),
    "0_Transformer/tokenizer.json is empty": lambda folder: (folder / "0_Transformer" / "tokenizer.json").write_text(""),
    "0_Transformer has no config.json": lambda folder: (folder / "0_Transformer" / "config.json").unlink(),
    "1_Pooling/config.json is not a JSON object": lambda folder: (folder / "1_Pooling" / "config.json").write_text("[]"),
    "modules.json names 1_Pooling, which does not exist": lambda folder: shutil.rmtree(folder / "1_Pooling"),
}  # fmt: skip


@pytest.mark.parametrize("expected", PARTS)
def test_a_broken_part_of_an_embedding_model_is_named(
    expected: str, embedder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    PARTS[expected](Path(shutil.copytree(embedder, tmp_path / "model")))
    (tmp_path / "texts.txt").write_text("A cat.\nA dog.\n")
    words = ["--file", str(tmp_path / "texts.txt"), "--query", "cat"]
    assert main(["use", "--model", str(tmp_path / "model"), *words]) == 2
    error = capsys.readouterr().err
    assert expected in error, error
    assert "Traceback" not in error


def test_an_embedding_model_in_folders_works(embedder: Path, tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("A cat.\nA dog.\n")
    assert main(["use", "--model", str(embedder), "--file", str(tmp_path / "texts.txt"), "--query", "cat"]) == 0
