"""`stoker train ner` from data to a model, predictions and a report; mistakes give one sentence."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from stoker.cli import main

NAMES, PLACES = ["Ada Lovelace", "Charles", "Grace Hopper"], ["London", "New York", "Paris"]


def sentences(count: int, scheme: str = "IOB2") -> list[tuple[list[str], list[str]]]:
    found = []
    for n in range(count):
        parts = [
            ("PER", NAMES[n % 3]),
            ("", "wrote to"),
            ("PER", NAMES[(n + 1) % 3]),
            ("", "from"),
            ("LOC", PLACES[n % 2]),
        ]
        words: list[str] = []
        tags: list[str] = []
        for kind, part in parts:
            some = part.split()
            words += some
            if not kind:
                tags += ["O"] * len(some)
            elif scheme == "IOBES":
                edges = ["S"] if len(some) == 1 else ["B", *"I" * (len(some) - 2), "E"]
                tags += [f"{edge}-{kind}" for edge in edges]
            else:
                tags += [f"{'I' if i else 'B'}-{kind}" for i in range(len(some))]
        found.append((words, tags))
    return found


def conll(path: Path, count: int, scheme: str = "IOB2") -> Path:
    path.write_text("\n".join("".join(map("{}\t{}\n".format, *one)) for one in sentences(count, scheme)))
    return path


def command(bert: Path, out: Path, **options: Any) -> list[str]:
    words = ["train", "ner", "--model_name_or_path", str(bert), "--output_dir", str(out), "--report_to", "none"]
    settings = {"learning_rate": "5e-3", "per_device_train_batch_size": "4", "max_steps": "6", **options}
    return [
        *words,
        *(word for name, value in settings.items() for word in (f"--{name}", *([str(value)] if value else []))),
    ]


@pytest.fixture(scope="module")
def trained(bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ner")
    train, dev = conll(folder / "train.conll", 48), conll(folder / "dev.conll", 9)
    out = folder / "out"
    words = command(bert, out, train_file=train, validation_file=dev, test_file=dev, do_train="", do_eval="", do_predict="",
                    max_steps=24, return_entity_level_metrics="")  # fmt: skip
    assert main(words) == 0
    return out


def test_a_run_leaves_model_scores_predictions_card_and_report(trained: Path) -> None:
    results = json.loads((trained / "all_results.json").read_text())
    assert {
        "eval_f1",
        "eval_precision",
        "eval_recall",
        "eval_accuracy",
        "eval_loss",
        "eval_PER_f1",
        "eval_LOC_number",
    } <= set(results)
    assert results["eval_samples"] == 9
    assert results["eval_f1"] > 0.9, "the sentences are easy"
    config = json.loads((trained / "config.json").read_text())
    assert list(config["id2label"].values()) == ["O", "B-LOC", "I-LOC", "B-PER", "I-PER"]
    lines = (trained / "predictions.conll").read_text().split("\n\n")[:-1]
    assert [[line.split("\t")[0] for line in one.strip().split("\n")] for one in lines] == [
        words for words, _ in sentences(9)
    ]
    card = (trained / "README.md").read_text()
    assert 'pipeline_tag: "token-classification"' in card
    page = (trained / "report.html").read_text()
    for shown in (
        "named entities",
        "What it finds",
        "Scores by type",
        "Which types are confused",
        "<small>PER</small>",
    ):
        assert shown in page


def test_the_model_works_in_transformers_own_pipeline(trained: Path) -> None:
    from transformers import pipeline

    found = pipeline("ner", model=str(trained), aggregation_strategy="first", device="cpu")(
        "Grace Hopper wrote to Charles from Paris"
    )
    assert [(one["entity_group"], one["word"]) for one in found][:2] == [("PER", "grace hopper"), ("PER", "charles")]


def test_evaluating_uses_the_labels_of_the_model(
    trained: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(logging.getLogger("stoker"), "propagate", True)  # whatever commands that ran before have set up
    rows = [
        {
            "text": "Ada Lovelace wrote to Charles from London",
            "entities": [[0, 12, "PER"], [22, 29, "PER"], [35, 41, "CITY"]],
        }
    ]
    (tmp_path / "dev.jsonl").write_text("\n".join(map(json.dumps, rows * 3)))
    assert main(command(trained, tmp_path / "out", validation_file=tmp_path / "dev.jsonl", do_eval="")) == 0
    assert "types that the model does not know (CITY); they count as not found" in caplog.text
    assert json.loads((tmp_path / "out" / "eval_results.json").read_text())["eval_recall"] == pytest.approx(
        2 / 3, abs=0.01
    )
    assert "tagging nothing scores 0.4286, f1 0" in capsys.readouterr().err  # four of seven words are in an entity


def test_iobes_spans_windows_and_data_of_the_hub(
    bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    datasets = pytest.importorskip("datasets")
    names = ["O", "B-PER", "I-PER", "E-PER", "S-PER", "B-LOC", "I-LOC", "E-LOC", "S-LOC"]
    features = datasets.Features(
        {
            "tokens": datasets.Sequence(datasets.Value("string")),
            "ner_tags": datasets.Sequence(datasets.ClassLabel(names=names)),
        }
    )
    words, tags = zip(*sentences(12, "IOBES"), strict=True)
    columns = {"tokens": words, "ner_tags": [[names.index(tag) for tag in one] for one in tags]}
    folder = tmp_path / "data"
    folder.mkdir()
    for split in ("train", "validation", "test"):
        datasets.Dataset.from_dict(columns, features=features).to_parquet(folder / f"{split}.parquet")
    out = tmp_path / "out"
    words_ = command(
        bert,
        out,
        dataset_name=folder,
        do_train="",
        do_eval="",
        do_predict="",
        max_seq_length=10,
        doc_stride=3,
        max_steps=2,
    )
    assert main(words_) == 0
    assert list(json.loads((out / "config.json").read_text())["id2label"].values()) == names
    predicted = [json.loads(line) for line in (out / "predictions.jsonl").read_text().splitlines()]
    assert [len(row["ner_tags"]) for row in predicted] == [len(one) for one in words]
    printed = capsys.readouterr().err
    assert "data: 12 sentences, IOBES, entities of 2 types (LOC, PER)" in printed
    assert "on 12 sentences" in printed


def test_mistakes_in_the_data_are_one_sentence(bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "d.conll"
    for content, message in (
        ("", "contains no sentences"), ("a\tO\n", "the data has no entities"), ("a\tNN\n", "are not those of entities"),
        ("a\tO\n\nb\n", "1 of 2 rows"), ("a\tS-X\n\nb\tO\n\nc\tB-X\nd\tO\n", "O follows B-X, which is not valid IOBES"),
    ):  # fmt: skip
        path.write_text(content)
        assert main(command(bert, tmp_path / "out", train_file=path, do_train="")) == 2
        error = capsys.readouterr().err
        assert message in error
        assert "Traceback" not in error
    conll(path, 8)
    assert main(command(bert, tmp_path / "out", train_file=path, do_train="", max_seq_length=16, doc_stride=14)) == 2
    assert "cannot overlap by --doc_stride 14" in capsys.readouterr().err
    assert main(command(bert, tmp_path / "out", validation_file=path, do_eval="")) == 2
    assert "is not trained to find entities: its labels are LABEL_0, LABEL_1" in capsys.readouterr().err
