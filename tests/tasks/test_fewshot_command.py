"""`stoker train fewshot` trains what SetFit trains, and stores no pickle; SetFit's own scripts run under `stoker launch`."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("setfit", reason="needs the extra fewshot")

from rig import warm
from stoker.cli import main
from tasks.models import save_tiny_bert
from tasks.sentence_files import COLOURS, rows_of, write_lines
from tasks.task_runs import STOPPED, entries

SCRIPT = """
import json, sys
from datasets import Dataset
from setfit import SetFitModel, Trainer, TrainingArguments, sample_dataset

base, rows, out = sys.argv[1:]
data = Dataset.from_list([json.loads(line) for line in open(rows)])
labels = sorted(set(data["label"]))
data = data.map(lambda row: {"text": row["text"], "label": labels.index(row["label"])})
model = SetFitModel.from_pretrained(base, labels=labels)
args = TrainingArguments(
    output_dir=out, batch_size=8, max_steps=5, body_learning_rate=1e-3, logging_steps=1, report_to="none", save_strategy="no",
    seed=7, show_progress_bar=False,
)
trainer = Trainer(model, args, train_dataset=sample_dataset(data, num_samples=4, seed=7))
trainer.train()
found = {"history": trainer.st_trainer.state.log_history, "probabilities": model.predict_proba(data["text"]).tolist()}
json.dump(found, open(out + "/found.json", "w"))
"""
SAME = "--max_steps 5 --per_device_train_batch_size 8 --learning_rate 1e-3 --logging_steps 1 --seed 7 --examples_per_class 4"


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_tiny_bert(tmp_path_factory.mktemp("tiny") / "bert")
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }  # so that runs can be compared with stock
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lines(tmp_path_factory.mktemp("rows") / "rows.jsonl", rows_of("labelled texts", 60))


@pytest.fixture(scope="module")
def stock(bert: Path, rows: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the script finds without Stoker."""
    out = tmp_path_factory.mktemp("stock")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["script.py", str(bert), str(rows), str(out)])
        exec(compile(SCRIPT, "script.py", "exec"), {"__name__": "script"})
    found: dict[str, Any] = json.loads((out / "found.json").read_text())
    return found


@pytest.fixture(scope="module")
def trained(bert: Path, rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trained") / "out"
    more = [*SAME.split(), "--validation_file", str(rows), "--samples", "2", "--do_predict", "--test_file", str(rows)]
    assert main(command(bert, rows, out, *more)) == 0
    return out


def command(bert: Path, data: Path, out: Path, *more: str) -> list[str]:
    return [
        "train", "fewshot", "--model_name_or_path", str(bert), "--train_file", str(data), "--output_dir", str(out),
        "--report_to", "none", *more,
    ]  # fmt: skip


def losses(history: list[dict[str, Any]], name: str) -> list[float]:
    return [one[name] for one in history if name in one]


def used(folder: Path, capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert main(["use", "--model", str(folder), *words, "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_the_losses_and_probabilities_are_those_of_setfit(
    trained: Path, stock: dict[str, Any], rows: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    expected = losses(stock["history"], "embedding_loss")
    assert len(expected) == 5
    assert [one["loss"] for one in entries(trained, "step")] == pytest.approx(expected, rel=2e-4)
    texts = [row["text"] for row in rows_of("labelled texts", 60)]
    (tmp_path / "texts.txt").write_text("\n".join(texts))
    found = used(trained, capsys, "--file", str(tmp_path / "texts.txt"))
    for one, row in zip(found, stock["probabilities"], strict=True):
        scores = {each["label"]: each["score"] for each in one["found"]}
        assert scores == pytest.approx(dict(zip(sorted(COLOURS), row, strict=True)), abs=2e-3)
        assert list(scores.values()) == sorted(scores.values(), reverse=True)


@pytest.mark.part("tasks")
def test_a_script_of_setfit_runs_unmodified_under_launch_with_the_losses_of_stock(
    bert: Path, rows: Path, stock: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    words = ["launch", str(tmp_path / "script.py"), str(bert), str(rows), str(tmp_path)]
    done = warm.run([sys.executable, "-m", "stoker", *words], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert losses(found["history"], "embedding_loss") == pytest.approx(
        losses(stock["history"], "embedding_loss"), rel=2e-4
    )
    assert np.allclose(found["probabilities"], stock["probabilities"], atol=2e-3)
    for one in found["history"][:5]:
        assert one["tokens_per_second"] > 0
        assert 0 < one["padding_avoided"] < 1
    assert [one["loss"] for one in entries(tmp_path, "step")] == losses(found["history"], "embedding_loss")


@pytest.mark.parametrize("to", ["safetensors", "onnx"])
def test_an_export_classifies_as_the_original(
    trained: Path, to: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if to == "onnx":
        pytest.importorskip("onnxruntime", reason="needs the extra onnx")
    monkeypatch.setattr("stoker.tasks.export.comparison._SECONDS", 0.0)
    text = rows_of("labelled texts", 60)[5]["text"]
    original = used(trained, capsys, "--text", text)
    assert main(["export", str(trained), "--to", to, "--output_dir", str(tmp_path / to)]) == 0
    if to == "onnx":
        assert "accuracy" in capsys.readouterr().out, "scored on the validation file of the run"
    assert (tmp_path / to / "model_head.safetensors").read_bytes() == (trained / "model_head.safetensors").read_bytes()
    (found,) = used(tmp_path / to, capsys, "--text", text)
    assert [row["label"] for row in found["found"]] == [row["label"] for row in original[0]["found"]]
    assert [row["score"] for row in found["found"]] == pytest.approx(
        [row["score"] for row in original[0]["found"]], abs=1e-3
    )


def test_the_result_is_a_folder_without_pickles_with_report_card_and_recipe(trained: Path) -> None:
    assert [one["step"] for one in entries(trained, "evaluation")] == [0, 5]
    assert {"eval_accuracy", "eval_f1", "train_loss"} <= set(json.loads((trained / "all_results.json").read_text()))
    page = (trained / "report.html").read_text()
    assert 2 <= page.count("before training:") == page.count("after training:") <= 4
    assert "16 examples of 4 classes" in page
    assert "examples_per_class: 4" in (trained / "recipe.yaml").read_text()
    assert not [path for path in trained.rglob("*") if path.suffix in {".pkl", ".pickle", ".joblib"}]
    lines = (trained / "predict_results.txt").read_text().splitlines()
    assert len(lines) == 61
    assert {line.split("\t")[1] for line in lines[1:]} <= {*COLOURS}


def test_the_card_shows_how_to_classify_without_stoker(
    trained: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    card = (trained / "README.md").read_text()
    assert 'pipeline_tag: "text-classification"' in card
    assert "examples_per_class: 4" in card
    code = card.partition("```python\n")[2].partition("```")[0]
    assert "stoker" not in code
    (found,) = used(trained, capsys, "--text", "One sentence.")
    exec(compile(code, "card", "exec"), {})
    assert capsys.readouterr().out.strip() == found["found"][0]["label"]


def test_a_model_on_the_hub_is_recognised_as_a_classifier(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here,) = used(trained, capsys, "--text", "One sentence.")
    repository, commit = tmp_path / "hub" / "models--somebody--colours", "0" * 40
    shutil.copytree(trained, repository / "snapshots" / commit, ignore=shutil.ignore_patterns("checkpoint-*"))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    done = warm.run(
        [sys.executable, "-m", "stoker", "use", "--model", "somebody/colours", "--text", "One sentence.", "--json"],
        env={**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout) == here


class Trap:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.path),))


def test_a_pickled_classifier_is_never_opened(
    bert: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from sentence_transformers import SentenceTransformer

    model, trap = tmp_path / "setfit", tmp_path / "sprung"
    SentenceTransformer(str(bert), device="cpu").save_pretrained(str(model))
    (model / "model_head.pkl").write_bytes(pickle.dumps(Trap(trap)))
    assert main(["use", "--model", str(model), "--text", "a"]) == 2
    assert "as a pickle, which can run any code" in capsys.readouterr().err
    assert main(["use", "--model", str(model), "--text", "a", "--as", "embed", "--query", "a"]) == 0
    words = ["--do_train", "False", "--do_eval", "--validation_file", str(rows)]
    assert main(["train", "fewshot", "--model_name_or_path", str(model), *words, "--output_dir", str(tmp_path)]) == 2
    assert "its classifier is in model_head.pkl" in capsys.readouterr().err
    assert main(command(model, rows, tmp_path / "out", "--max_steps", "1", "--save_strategy", "no")) == 0
    assert not (tmp_path / "out" / "model_head.pkl").exists()
    assert not trap.exists()


def test_evaluation_alone_uses_the_classifier_in_the_folder(
    trained: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"--do_train False --do_eval --validation_file {rows} --output_dir {tmp_path} --report_to none".split()
    assert main(["train", "fewshot", "--model_name_or_path", str(trained), *words]) == 0
    scores = [json.loads((folder / "eval_results.json").read_text())["eval_accuracy"] for folder in (trained, tmp_path)]
    assert scores[0] == scores[1]
    assert not (tmp_path / "model.safetensors").exists()


DAMAGES = {
    "cut": "model_head.safetensors is damaged or cut short",
    "labels": "does not list its labels",
    "fewer": "does not fit: 3 labels and embeddings of 32 numbers need a weight of 3 x 32",
    "nan": "contains NaN or infinite values",
    "json": "config_setfit.json is not JSON",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_classifier_is_refused_in_one_sentence(damage: str, trained: Path, tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    from stoker.errors import UserError
    from stoker.tasks.fewshot.classifier_head import Head

    for name in ("model_head.safetensors", "config_setfit.json"):
        (tmp_path / name).write_bytes((trained / name).read_bytes())
    head, labels = tmp_path / "model_head.safetensors", tmp_path / "config_setfit.json"
    assert Head.load(tmp_path, 32).labels == tuple(sorted(COLOURS))
    if damage == "cut":
        head.write_bytes(head.read_bytes()[:-8])
    elif damage == "nan":
        tensors = load_file(head)
        save_file({**tensors, "bias": tensors["bias"] * np.nan}, head)
    else:
        labels.write_text({"labels": '{"labels": [1, 2]}', "fewer": '{"labels": ["a", "b", "c"]}', "json": "{"}[damage])
    with pytest.raises(UserError, match=DAMAGES[damage]):
        Head.load(tmp_path, 32)


@pytest.mark.parametrize("classes", [2, 3])
def test_the_stored_classifier_gives_the_probabilities_of_the_fitted_one(classes: int, tmp_path: Path) -> None:
    from sklearn.linear_model import LogisticRegression

    from stoker.tasks.fewshot.classifier_head import Head

    draw = np.random.default_rng(0)
    texts, numbers = draw.normal(size=(30, 8)).astype(np.float32), np.arange(30) % classes
    fitted = LogisticRegression().fit(texts, numbers)
    Head.of_regression(fitted, [f"class {n}" for n in range(classes)]).save(tmp_path)
    head = Head.load(tmp_path, 8)
    assert head.labels == tuple(f"class {n}" for n in range(classes))
    assert np.allclose(head.probabilities(texts), fitted.predict_proba(texts), atol=1e-6)


@pytest.mark.parametrize("strategy", ["oversampling", "undersampling", "unique"])
@pytest.mark.parametrize("iterations", [None, 2])
@pytest.mark.parametrize("most", [None, 24])
def test_pairs_are_those_of_setfit(strategy: str, iterations: int | None, most: int | None) -> None:
    from setfit.sampler import ContrastiveDataset

    from stoker.tasks.fewshot.pairs import count_pairs, make_pairs

    texts, classes = [f"text {n}" for n in range(11)], [0, 1, 2, 0, 1, 0, 0, 2, 1, 0, 0]
    expected = list(ContrastiveDataset(texts, classes, False, iterations, strategy, max_pairs=most or -1))
    found = make_pairs(texts, classes, strategy=strategy, iterations=iterations, most=most)
    assert found.texts == [(one["sentence_1"], one["sentence_2"]) for one in expected]
    assert found.labels == [one["label"] for one in expected]
    if most is None:
        assert len(expected) == count_pairs(classes, strategy, iterations)


@pytest.mark.part("kills")
def test_a_killed_run_resumes_to_bitwise_the_same_weights_and_classifier(
    rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in training, and ended a second time when the embeddings are trained and the classifier is not."""
    from safetensors.torch import load_file

    from stoker.tasks.fewshot.head_fit import HeadFit

    bert = save_tiny_bert(tmp_path / "bert")  # with dropout
    usual = ["--max_steps", "8", "--save_steps", "2", "--learning_rate", "1e-3", "--samples", "0"]
    assert main(command(bert, rows, tmp_path / "whole", *usual)) == 0
    again = command(bert, rows, tmp_path / "parts", *usual)
    words = [sys.executable, "-c", STOPPED, "5", str(int(signal.SIGKILL)), *again]
    done = warm.run(words, capture_output=True, text=True, timeout=300, transformers=True)
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    with monkeypatch.context() as patch:
        patch.setattr(HeadFit, "__call__", lambda self, model: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            main(again)
    assert "checkpoint-4 (" in capsys.readouterr().err
    assert not (tmp_path / "parts" / "model_head.safetensors").exists()
    assert main(again) == 0
    assert "checkpoint-8 (" in capsys.readouterr().err
    for name in ("model.safetensors", "model_head.safetensors"):
        whole, parts = (load_file(tmp_path / folder / name) for folder in ("whole", "parts"))
        assert whole.keys() == parts.keys()
        assert all(torch.equal(whole[one], parts[one]) for one in whole)


def test_options_of_training_work_together(bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = [{"id": n, "body": row["text"], "class": n % 2} for n, row in enumerate(rows_of("labelled texts", 30))]
    data = write_lines(
        tmp_path / "rows.jsonl", [*kept, {"body": "", "class": 1}, {"id": 99, "body": "Rare.", "class": 2}]
    )
    more = ["--text_column_names", "body", "--label_column_name", "class", "--num_iterations", "2", "--bf16",
            "--tokens_per_batch", "256", "--max_seq_length", "16", "--eval_strategy", "steps", "--eval_steps", "2",
            "--save_steps", "2", "--load_best_model_at_end", "--max_steps", "4", "--validation_file", str(data)]  # fmt: skip
    assert main(command(bert, data, tmp_path / "out", *more)) == 2
    assert "line 31: its body is empty" in capsys.readouterr().err
    data.write_text("\n".join(line for line in data.read_text().splitlines() if '"body": ""' not in line))
    assert main(command(bert, data, tmp_path / "out", *more)) == 0
    said = capsys.readouterr().err
    assert "17 of 31 examples, 8 of each of 3 classes" in said
    assert "classes with fewer examples: 2 (1)" in said
    assert "68 pairs of them" in said
    (found,) = used(tmp_path / "out", capsys, "--text", "Rare.", "--top", "2")
    assert len(found["found"]) == 2


MISTAKES = {
    "@ --examples_per_class 0": "--examples_per_class is 0; it must be 1 or more",
    "@ --num_iterations 0": "--num_iterations is 0; it must be 1 or more",
    "@ --sampling_strategy all": "--sampling_strategy",
    "@ --label_column_name score": "there is no column 'score'",
    "@ --text_column_names text,label": "has two columns of texts",
    "@ --train_file pairs.jsonl": "has two columns of texts; name one of them",
    "@ --train_file one.jsonl": "the label has 1 value (red); classification needs two or more",
    "@ --train_file fractions.jsonl": "use `stoker train classify --do_regression`",
    "@ --validation_file strange.jsonl": "the validation data has labels that the training data does not have: pink",
    "@ --train_file many.jsonl": "limit them with --num_iterations 20",
    "@ --metric_for_best_model loss --eval_strategy steps --validation_file rows.jsonl": "is not measured",
    "@ --train_file missing.jsonl": "missing.jsonl does not exist",
    "@ --model_name_or_path empty": "no model can be loaded from the folder empty",
    "--model_name_or_path model --output_dir o": "--train_file is missing",
    "--model_name_or_path model --do_train False --do_eval --validation_file rows.jsonl": "it has no model_head.safetensors",
}  # fmt: skip


@pytest.mark.parametrize("words", MISTAKES)
def test_an_invalid_request_gets_one_sentence_and_exit_code_two(
    words: str,
    bert: Path,
    rows: Path,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").symlink_to(bert)
    (tmp_path / "rows.jsonl").symlink_to(rows)
    (tmp_path / "empty").mkdir()
    some = rows_of("labelled texts", 8)
    write_lines(tmp_path / "one.jsonl", [{**row, "label": "red"} for row in some])
    write_lines(tmp_path / "fractions.jsonl", [{**row, "label": n / 3} for n, row in enumerate(some)])
    write_lines(tmp_path / "strange.jsonl", [{**row, "label": "pink"} for row in some])
    write_lines(tmp_path / "pairs.jsonl", [{"sentence1": "a", "sentence2": "b", "label": n % 2} for n in range(8)])
    if "many" in words:
        write_lines(tmp_path / "many.jsonl", [{"text": f"text {n}", "label": f"class {n}"} for n in range(1600)])
    usual = "--model_name_or_path model --train_file rows.jsonl --output_dir o --report_to none --samples 0"
    assert main(["train", "fewshot", *words.replace("@", usual).split()]) == 2
    error = capsys.readouterr().err
    assert MISTAKES[words] in error
    assert "Traceback" not in error
