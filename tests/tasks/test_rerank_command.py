"""`stoker train rerank` from data to a CrossEncoder that stock libraries load; mistakes give one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from parts import rest_in

pytest.importorskip("sentence_transformers", reason="needs the extra embed")

from stoker.cli import main
from tasks.sentence_files import rows_of, write_lines
from tasks.task_runs import assert_resumes_exactly, entries, in_two_ranks, train_command, weights


def command(model: Path, data: Path, out: Path, *more: str) -> list[str]:
    return train_command("rerank", model, data, out, *more)


@pytest.mark.parametrize(
    ("kind", "loss", "score", "outputs"),
    rest_in(
        "tasks",
        [
            ("pairs", "MultipleNegativesRankingLoss", "ndcg@10", 1),
            ("pairs with classes", "CrossEntropyLoss", "f1_macro", 3),
            ("lists", "BinaryCrossEntropyLoss", "ndcg@10", 1),
            ("triplets", "BinaryCrossEntropyLoss", "ndcg@10", 1),
            ("pairs with scores", "BinaryCrossEntropyLoss", "spearman", 1),
        ],
        keep=3,
    ),
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
    assert page.count("before training:") == page.count("after training:") > 0
    card = (out / "README.md").read_text()
    assert f'pipeline_tag: "{"text-ranking" if outputs == 1 else "text-classification"}"' in card
    exec(compile(card.partition("```python\n")[2].partition("```")[0], "card", "exec"), {})
    printed = capsys.readouterr().out.strip()
    assert (printed in ("no", "perhaps", "yes")) == (outputs > 1), printed
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
    rest_in(
        "tasks",
        [
            ("pairs", ["--mine_negatives", "2", "--mining_model", "MODEL"]),
            ("lists", ["--loss", "LambdaLoss", "--max_seq_length", "24"]),
            ("pairs", ["--loss", "CachedMultipleNegativesRankingLoss", "--mini_batch_size", "8", "--bf16"]),
            ("lists", ["--loss", "listmle", "--tokens_per_batch", "1024"]),
            ("triplets", ["--loss", "RankNetLoss", "--gradient_accumulation_steps", "2"]),
            ("pairs with scores", ["--loss", "MSELoss", "--group_by_length", "--no_ipex"]),
        ],
        keep=2,
    ),
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


@pytest.mark.part("kills")
@pytest.mark.parametrize("kind", ["pairs", "pairs with scores"], ids=["random negatives", "scores"])
def test_a_killed_run_resumes_to_bitwise_the_same_weights(
    kind: str, bert: Path, files: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    usual = ["--max_steps", "8", "--per_device_train_batch_size", "16", "--save_steps", "2", "--learning_rate", "1e-3"]
    assert_resumes_exactly(lambda out: command(bert, files[kind], out, *usual), tmp_path, capsys)


@pytest.mark.part("tasks")
def test_two_processes_train_one_model(bert: Path, files: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    in_two_ranks(command(bert, files["triplets"], out, "--validation_file", str(files["triplets"]), "--samples", "1"))
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
    "@ --model_name_or_path three": "; --ignore_mismatched_sizes replaces it with a new one",
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
    if "three" in words:
        from sentence_transformers import CrossEncoder

        CrossEncoder(str(bert), num_labels=3, device="cpu").save_pretrained(str(tmp_path / "three"))
    usual = (
        "--model_name_or_path model --train_file train.jsonl --output_dir o --max_steps 1 --report_to none --samples 0"
    )
    assert main(["train", "rerank", *words.replace("@", usual).split()]) == 2
    error = capsys.readouterr().err
    assert MISTAKES[words] in error
    assert "Traceback" not in error


@pytest.mark.parametrize("labelled", [True, False], ids=["some of its classes", "no labels"])
def test_predictions_have_the_classes_of_the_model_in_its_own_order(
    labelled: bool, bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from sentence_transformers import CrossEncoder

    model = CrossEncoder(str(bert), num_labels=3, device="cpu")
    names = ["yes", "perhaps", "no"]
    model.config.id2label, model.config.label2id = dict(enumerate(names)), {name: n for n, name in enumerate(names)}
    model.model.classifier.bias.data.copy_(torch.tensor([9.0, 0.0, 0.0]))  # it always says yes, which is sorted last
    model.save_pretrained(str(tmp_path / "model"))
    rows = [row for row in rows_of("pairs with classes") if row["label"] != "perhaps"]
    rows = rows if labelled else [{name: row[name] for name in ("premise", "hypothesis")} for row in rows]
    data, out = write_lines(tmp_path / "test.jsonl", rows), tmp_path / "out"
    options = ["--model_name_or_path", str(tmp_path / "model"), "--output_dir", str(out), "--report_to", "none"]
    options += ["--validation_file", str(data)] if labelled else []
    assert main(["train", "rerank", *options, "--do_train", "False", "--do_predict", "--test_file", str(data)]) == 0
    found = [line.split("\t")[1] for line in (out / "predict_results.txt").read_text().splitlines()[1:]]
    assert found == ["yes"] * len(rows)
