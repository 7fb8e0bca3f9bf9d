"""`stoker train rerank` from data to a CrossEncoder that stock libraries load; mistakes give one sentence."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("sentence_transformers", reason="needs the extra embed")

from stoker.cli import main
from tasks.models import save_tiny_bert
from tasks.sentence_files import rows_of, write_lines

KINDS = ("pairs", "triplets", "pairs with scores", "pairs with classes", "lists")


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_bert(tmp_path_factory.mktemp("tiny") / "bert")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("rows")
    return {kind: write_lines(folder / f"{kind.replace(' ', '-')}.jsonl", rows_of(kind)) for kind in KINDS}


def command(bert: Path, data: Path, out: Path, *more: str) -> list[str]:
    return [
        "train", "rerank", "--model_name_or_path", str(bert), "--train_file", str(data), "--output_dir", str(out),
        "--max_steps", "2", "--report_to", "none", "--samples", "0", *more,
    ]  # fmt: skip


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def entries(folder: Path, kind: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / "run.jsonl").read_text().splitlines()]
    return [one for one in found if one["kind"] == kind]


@pytest.mark.parametrize(
    ("kind", "loss", "score", "outputs"),
    [
        ("pairs", "MultipleNegativesRankingLoss", "ndcg@10", 1),
        ("triplets", "BinaryCrossEntropyLoss", "ndcg@10", 1),
        ("pairs with scores", "BinaryCrossEntropyLoss", "spearman", 1),
        ("pairs with classes", "CrossEntropyLoss", "f1_macro", 3),
        ("lists", "BinaryCrossEntropyLoss", "ndcg@10", 1),
    ],
)
def test_each_kind_of_data_has_its_loss_and_evaluator(
    kind: str, loss: str, score: str, outputs: int, bert: Path, files: dict[str, Path], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    from sentence_transformers import CrossEncoder

    out = tmp_path / "out"
    more = ["--validation_file", str(files[kind]), "--test_file", str(files[kind]), "--do_predict", "--samples", "2"]
    assert main(command(bert, files[kind], out, *more)) == 0
    assert f"loss {loss}" in capsys.readouterr().err
    assert [one["step"] for one in entries(out, "evaluation")] == [0, 2]
    step = entries(out, "step")[0]
    assert step["tokens_per_second"] > 0
    assert 0 < step["padding_avoided"] < 1
    assert {f"eval_{score}", "eval_loss", "train_loss"} <= set(json.loads((out / "all_results.json").read_text()))
    page = (out / "report.html").read_text()
    assert page.count("before training:") == page.count("after training:")
    assert (page.count("after training:") > 0) == (kind != "pairs with classes")
    assert 'pipeline_tag: "text-ranking"' in (out / "README.md").read_text()
    model = CrossEncoder(str(out), device="cpu")
    rows = rows_of(kind)
    pairs = [tuple(v for v in row.values() if isinstance(v, str))[:2] for row in rows] if kind != "lists" else [
        (row["query"], text) for row in rows for text in row["documents"]
    ]  # fmt: skip
    scores = model.predict(pairs)
    assert scores.shape == ((len(pairs), outputs) if outputs > 1 else (len(pairs),))
    lines = (out / "predict_results.txt").read_text().splitlines()[1:]
    if outputs > 1:
        names = [model.config.id2label[int(one)] for one in scores.argmax(1)]
        assert sorted(model.config.id2label.values()) == ["no", "perhaps", "yes"]
        assert [line.split("\t")[1] for line in lines] == names
    else:
        assert [float(line.split("\t")[1]) for line in lines] == pytest.approx(scores.tolist(), abs=1e-3)


def test_training_gives_the_losses_and_weights_of_stock_sentence_transformers(
    bert: Path, files: dict[str, Path], tmp_path: Path
) -> None:
    from datasets import Dataset
    from sentence_transformers.cross_encoder import (
        CrossEncoder,
        CrossEncoderTrainer,
        CrossEncoderTrainingArguments,
        losses,
    )

    still = tmp_path / "still"
    head = CrossEncoder(str(bert), num_labels=1, device="cpu")
    head.config.hidden_dropout_prob = head.config.attention_probs_dropout_prob = 0.0
    head.save_pretrained(str(still))
    out = tmp_path / "out"
    more = ["--max_steps", "4", "--learning_rate", "1e-3", "--warmup_steps", "0", "--logging_steps", "1"]
    assert main(command(still, files["pairs with scores"], out, *more)) == 0
    model = CrossEncoder(str(still), device="cpu")
    args = CrossEncoderTrainingArguments(
        output_dir=str(tmp_path / "stock"), max_steps=4, per_device_train_batch_size=16, learning_rate=1e-3, logging_steps=1,
        report_to="none", save_strategy="no", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    rows = [{**row, "score": row["score"] / 5} for row in rows_of("pairs with scores")]
    trainer = CrossEncoderTrainer(
        model, args, train_dataset=Dataset.from_list(rows), loss=losses.BinaryCrossEntropyLoss(model)
    )
    trainer.train()
    expected = [one["loss"] for one in trainer.state.log_history if "loss" in one]
    assert [one["loss"] for one in entries(out, "step")] == pytest.approx(expected, rel=2e-4)
    stock = model.transformers_model.state_dict()
    for name, one in weights(out).items():
        assert torch.allclose(one, stock[name], atol=3e-4), name


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("pairs", ["--mine_negatives", "2", "--mining_model", "MODEL"]),
        ("pairs", ["--loss", "CachedMultipleNegativesRankingLoss", "--mini_batch_size", "8", "--bf16"]),
        ("lists", ["--loss", "LambdaLoss", "--max_seq_length", "24"]),
        ("lists", ["--loss", "listmle", "--tokens_per_batch", "1024"]),
        ("triplets", ["--loss", "RankNetLoss", "--gradient_accumulation_steps", "2"]),
        ("pairs with scores", ["--loss", "MSELoss", "--group_by_length", "--no_ipex"]),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_options_of_training_work_together(
    kind: str, more: list[str], bert: Path, files: dict[str, Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    more = [str(bert) if word == "MODEL" else word for word in more]
    assert main(command(bert, files[kind], out, *more)) == 0
    assert weights(out)["classifier.weight"].shape == (1, 32)
    assert entries(out, "start")[0]["data"] == (
        "triplets" if "--mine_negatives" in more else {"lists": "pairs with scores"}.get(kind, kind)
    )


STOPPED = """
import os, signal, sys
from stoker.cli import main
from stoker.tasks.sentences.st_trainers import RerankTrainer
step = RerankTrainer.training_step
def stopped(self, *args, **named):
    if self.state.global_step == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self, *args, **named)
RerankTrainer.training_step = stopped
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("kind", ["pairs with scores", "pairs"], ids=["scores", "random negatives"])
def test_a_killed_run_resumes_to_bitwise_the_same_weights(
    kind: str, bert: Path, files: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from rig import warm

    usual = ["--max_steps", "8", "--per_device_train_batch_size", "16", "--save_steps", "2", "--learning_rate", "1e-3"]
    assert main(command(bert, files[kind], tmp_path / "whole", *usual)) == 0
    again = command(bert, files[kind], tmp_path / "parts", *usual)
    done = warm.run(
        [sys.executable, "-c", STOPPED, *again], capture_output=True, text=True, timeout=300, transformers=True
    )
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    assert main(again) == 0
    assert "resuming from" in capsys.readouterr().err
    whole, parts = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_two_processes_train_one_model(bert: Path, files: dict[str, Path], tmp_path: Path) -> None:
    import subprocess

    out = tmp_path / "out"
    more = ["--validation_file", str(files["triplets"]), "--samples", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "stoker", "launch", "-n", "2", "-m", "stoker",
         *command(bert, files["triplets"], out, *more)],
        capture_output=True, text=True, timeout=600, env={**os.environ},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert (out / "model.safetensors").exists()
    assert "eval_ndcg@10" in json.loads((out / "eval_results.json").read_text())


MISTAKES = {
    "@ --loss CosineSimilarityLoss": "--loss CosineSimilarityLoss is unknown",
    "@ --loss BinaryCrossEntropy": "takes pairs with scores or triplets, and the training data has pairs",
    "@ --mine_negatives 2": "name one with --mining_model",
    "@ --mine_negatives 2 --mining_model empty": "no model can be loaded from the folder empty",
    "@ --train_file labelled.jsonl": "a reranker reads two texts",
    "@ --train_file negative.jsonl": "a pair has the score -1",
    "@ --train_file one.jsonl --loss LambdaLoss": "needs queries with several documents of different scores",
    "@ --train_file one.jsonl --loss CrossEntropyLoss": "the pairs have one class (1)",
    "@ --train_file classes.jsonl --validation_file negative.jsonl": "differ in kind",
    "@ --model_name_or_path empty": "no model can be loaded from the folder empty",
    "--model_name_or_path model --output_dir o": "--train_file is missing",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_an_invalid_request_gets_one_sentence_and_exit_code_two(
    words: str, bert: Path, files: dict[str, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").symlink_to(bert)
    (tmp_path / "train.jsonl").symlink_to(files["pairs"])
    (tmp_path / "classes.jsonl").symlink_to(files["pairs with classes"])
    write_lines(tmp_path / "labelled.jsonl", [{"text": "x", "label": "y"}])
    write_lines(tmp_path / "negative.jsonl", [{"query": "q", "document": "d", "score": n} for n in (-1, 1)])
    write_lines(tmp_path / "one.jsonl", [{"query": f"q{n}", "document": "d", "score": 1} for n in range(4)])
    (tmp_path / "empty").mkdir()
    usual = (
        "--model_name_or_path model --train_file train.jsonl --output_dir o --max_steps 1 --report_to none --samples 0"
    )
    assert main(["train", "rerank", *words.replace("@", usual).split()]) == 2
    error = capsys.readouterr().err
    assert MISTAKES[words] in error
    assert "Traceback" not in error
