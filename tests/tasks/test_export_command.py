"""`stoker export`: what is written computes what the original computes, and is loaded by `stoker use`, `ask` and `chat`."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import SafetensorError

from rig import warm
from stoker.cli import main
from stoker.errors import UserError
from stoker.run_report.log import RunLog, read_run
from stoker.tasks.export import comparison
from stoker.tasks.export.export_folder import staged, write_facts
from stoker.tasks.export.export_source import find_source
from stoker.tasks.export.exported_model import load_exported
from tasks.models import wordpiece
from tasks.test_use_command import TEXTS, save

PAIRS = [("yes", "A cat sits.", "A cat is sitting."), ("no", "It rains.", "The market fell.")] * 8


def exported(source: Path, *words: str) -> Path:
    assert main(["export", str(source), *words]) == 0
    return source / (f"{words[1]}-int8" if "--int8" in words else words[1])


def run_folder(folder: Path) -> Path:
    """A classifier as a run leaves it: with its recipe, its validation file and its log."""
    save("classify", folder)
    data = folder / "dev.jsonl"
    rows = [json.dumps({"sentence1": a, "sentence2": b, "label": label}) for label, a, b in PAIRS]
    data.write_text("\n".join(rows) + "\n")
    (folder / "recipe.yaml").write_text(
        f"task: classify\nvalidation_file: {data}\nlearning_rate: 0.1\ndo_train: true\nlive: true\n"
    )
    RunLog(folder).write("start", task="classify", model="tiny")
    return folder


@pytest.fixture(scope="module", autouse=True)
def short_measurements() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comparison, "_SECONDS", 0.0)
        yield


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("exports")


@pytest.fixture(scope="module")
def answering(root: Path) -> Path:
    return exported(save("answer", root / "answer"), "--to", "onnx")


@pytest.mark.part("tasks")
def test_a_classifier_in_int8_is_scored_on_the_validation_data_and_added_to_the_report_once(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_folder(root / "run")
    target = exported(run, "--to", "onnx", "--int8")
    captured = capsys.readouterr()
    assert "--live" not in captured.err, "the run's option is not for its evaluation"
    printed = captured.out
    assert all(word in printed for word in ("accuracy", "F1", "size", "one row", "batch", "agreement", str(target)))
    facts = json.loads((target / "export.json").read_text())["comparison"]
    assert facts["before"]["scores"].keys() == facts["after"]["scores"].keys() == {"accuracy", "f1"}
    assert facts["after"]["size"] < facts["before"]["size"] / 2
    assert not [*target.glob("*.safetensors")]
    exported(run, "--to", "onnx", "--int8")
    (table,) = read_run(run).others["exports"]["tables"]
    assert table["title"] == "Exported to onnx, int8"
    assert (run / "report.html").read_text().count("Exported to onnx, int8") == 1
    capsys.readouterr()
    assert main(["use", "--model", str(target), "--text", "One.\tTwo.", "--json"]) == 0
    scores = {row["label"]: row["score"] for row in json.loads(capsys.readouterr().out)["found"]}
    stock = transformers.AutoModelForSequenceClassification.from_pretrained(run).eval()
    with torch.no_grad():
        expected = stock(**wordpiece()("One.", "Two.", return_tensors="pt")).logits.softmax(-1)[0]
    assert scores == {name: pytest.approx(float(expected[i]), abs=0.02) for i, name in stock.config.id2label.items()}


def test_rows_of_all_lengths_give_the_outputs_of_the_stock_model(answering: Path) -> None:
    stock = transformers.AutoModelForQuestionAnswering.from_pretrained(answering.parent).eval()
    model = load_exported(answering, stock.config)
    for texts in (["short", "a text " * 20, "a longer one " * 9, "x"], ["one"], ["two words"] * 3):
        batch = wordpiece()(texts, return_tensors="pt", padding=True)
        with torch.no_grad():
            expected, found = stock(**batch), model(**batch)
        real = batch["attention_mask"].bool()
        for name in ("start_logits", "end_logits"):
            torch.testing.assert_close(found[name][real], expected[name][real], rtol=1e-4, atol=1e-4)
    left = {"input_ids": torch.tensor([[0, 0, 5, 6]]), "attention_mask": torch.tensor([[0, 0, 1, 1]])}
    with torch.no_grad():
        expected, found = stock(**left), model(**left)
    torch.testing.assert_close(found.start_logits[:, 2:], expected.start_logits[:, 2:], rtol=1e-4, atol=1e-4)


def test_questions_are_answered_as_by_the_original(answering: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers = []
    for folder in (answering, answering.parent):
        assert (
            main(["ask", "--model", str(folder), "--text", "Ada wrote it.", "--question", "Who wrote it?", "--json"])
            == 0
        )
        answers.append(json.loads(capsys.readouterr().out))
    assert answers[0] == {**answers[1], "score": pytest.approx(answers[1]["score"], abs=1e-3)}


def test_an_export_is_not_trained_and_not_exported_again(answering: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--train_file", "x.json", "--output_dir", str(answering / "out"), "--do_train"]
    assert main(["train", "qa", "--model_name_or_path", str(answering), *words]) == 2
    assert "which cannot be trained; name the model it was made from" in capsys.readouterr().err
    assert main(["export", str(answering), "--to", "onnx"]) == 2
    assert "is an export already" in capsys.readouterr().err


def search(model: Path, capsys: pytest.CaptureFixture[str]) -> list[Any]:
    capsys.readouterr()
    file = model.parent / "texts.txt"
    file.write_text("\n".join(TEXTS))
    assert main(["use", "--model", str(model), "--file", str(file), "--query", "a small cat", "--json"]) == 0
    return [
        (row["number"], pytest.approx(row["score"], abs=0.01)) for row in json.loads(capsys.readouterr().out)["found"]
    ]


def test_embeddings_and_rerankers_keep_their_parts(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from sentence_transformers import CrossEncoder

    embed = save("embed", root / "embed")
    CrossEncoder(str(embed), num_labels=1, device="cpu").save_pretrained(str(root / "rerank"))
    assert search(exported(embed, "--to", "onnx"), capsys) == search(embed, capsys)
    assert search(exported(root / "rerank", "--to", "openvino"), capsys) == search(root / "rerank", capsys)


def test_openvino_in_int8_tags_as_the_original(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = save("tag", root / "tag")
    target = exported(source, "--to", "openvino", "--int8")
    config = transformers.AutoConfig.from_pretrained(source)
    stock = transformers.AutoModelForTokenClassification.from_pretrained(source).eval()
    batch = wordpiece()(["Ada met Grace in Torwick.", "Ada."], return_tensors="pt", padding=True)
    with torch.no_grad():
        expected, found = stock(**batch).logits, load_exported(target, config)(**batch).logits
    real = batch["attention_mask"].bool()
    torch.testing.assert_close(found[real], expected[real], rtol=0.05, atol=0.01)


@pytest.mark.parametrize(
    ("kind", "words", "message"),
    [
        ("classify", ["--to", "gguf"], "is not a language model, which --to gguf is for; use --to onnx or openvino"),
        ("classify", ["--to", "safetensors", "--int8"], "--int8 is for onnx, openvino and gguf"),
        ("classify", ["--to", "tflite"], "invalid choice"),
        ("classify", ["--to", "onnx", "--output_dir", "{root}"], "contains other files; name a new folder"),
        ("classify", ["--to", "onnx", "--output_dir", "{model}"], "is the model itself; name another folder"),
        ("classify", ["--to", "onnx", "--output_dir", "{model}/config.json"], "is a file; name a folder"),
        ("classify", ["--to", "onnx", "--validation_file", "nowhere.tsv"], "nowhere.tsv does not exist"),
        ("empty", ["--to", "onnx"], "is neither a run nor a model: it has no config.json"),
        ("killed", ["--to", "onnx"], "is a run without a saved model"),
        ("nowhere/model", ["--to", "onnx"], "name the folder of a run, or, for a model on the hub, add --output_dir"),
        ("pictures", ["--to", "onnx"], "is ViTForImageClassification, which is not supported; only encoders"),
    ],
)
def test_what_cannot_be_exported_gets_one_sentence_and_leaves_nothing(
    kind: str, words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / kind
    if kind == "classify":
        save(kind, model)
    elif "/" not in kind:
        model.mkdir()
    if kind == "killed":
        (model / "run.jsonl").write_text("")
    if kind == "pictures":
        transformers.ViTConfig(architectures=["ViTForImageClassification"]).save_pretrained(model)
    before = sorted(tmp_path.rglob("*"))
    assert main(["export", str(model), *(word.format(root=tmp_path, model=model) for word in words)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert sorted(tmp_path.rglob("*")) == before


def test_a_missing_package_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save("classify", tmp_path / "model")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert main(["export", str(tmp_path / "model"), "--to", "onnx"]) == 2
    assert "--to onnx needs onnxruntime: pip install 'stoker[onnx]'" in capsys.readouterr().err


def test_a_folder_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "onnx"
    for left in (".onnx.partial", ".onnx.replaced"):  # as a kill leaves them, here between the two renames
        (tmp_path / left).mkdir()
        (tmp_path / left / "model.onnx").write_text(left)
    with contextlib.suppress(RuntimeError), staged(target) as folder:
        (folder / "half").write_text("")
        raise RuntimeError("failed")
    assert (target / "model.onnx").read_text() == ".onnx.replaced"
    with staged(target) as folder:
        write_facts(folder, {})
    assert os.listdir(tmp_path) == ["onnx"]
    assert os.listdir(target) == ["export.json"]


def test_evaluation_takes_only_the_options_that_concern_it(tmp_path: Path) -> None:
    found = find_source(str(run_folder(tmp_path / "run")), None).evaluation
    assert found is not None
    assert [word.partition("=")[0] for word in found] == ["--validation_file"]


def test_a_file_size_limit_during_an_export_is_one_sentence(root: Path, tmp_path: Path) -> None:
    source = save("fill", root / "limited")
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1000 << 10,) * 2)"  # as ulimit -f 1000 does
    code = f"{limit}; import sys; from stoker.cli import main; sys.exit(main(sys.argv[1:]))"
    words = ["export", str(source), "--to", "safetensors", "--output_dir", str(tmp_path / "new")]
    done = warm.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=False, transformers=True
    )
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith(
        "stoker: the export new could not be written: the size limit of a file is 1.0 MB (ulimit -f); make"
    )
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
        ValueError("a library's own words: [Errno 28] No space left on device: 'model.onnx.data'"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_full_disk_during_an_export_is_one_sentence(error: Exception, tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        (folder / "half").write_text("")
        raise error

    message = rf"^the disk of {tmp_path} is full \(.* MB left\): the export onnx could not be written; make room"
    with pytest.raises(UserError, match=message), staged(tmp_path / "onnx") as folder:
        write(folder)
    assert os.listdir(tmp_path) == []
