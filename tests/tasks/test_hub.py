"""Data sets of the hub are processed like files: real ones from folders, names through a stand-in for the `datasets` package,
which would ask the hub."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow
import pyarrow.parquet as parquet
import pytest

from parts import rest_in
from stoker.cli import main
from stoker.tasks.demo.world import make_world
from tasks.language_models import chat, save_tiny_llama
from tasks.models import save_tiny_bert

REAL = pytest.mark.skipif(
    importlib.util.find_spec("datasets") is None, reason="needs the datasets package: pip install 'stoker[hub]'"
)
ASKED: list[tuple[str, str | None, str | None]] = []
MNLI = ("validation_matched", "validation_mismatched", "test_matched", "test_mismatched")


SQUAD = [
    {
        "id": q.id,
        "question": q.question,
        "context": q.context,
        "answers": {"text": list(q.answers), "answer_start": list(q.starts)},
    }
    for q in make_world(16, seed=1, training=True)
]


def pair(number: int) -> dict[str, Any]:
    return {"premise": f"a {number}", "hypothesis": f"b {number}", "label": number % 3, "idx": number}


PAIRS = [{"sentence1": f"a {n}", "sentence2": f"b {n}", "label": n % 2, "idx": n} for n in range(16)]
TAGGED = [{"tokens": ["Ada", "wrote", str(n)], "ner_tags": ["B-PER", "O", "O"]} for n in range(16)]
TEXTS = [{"text": f"A text about the number {n}."} for n in range(40)]
CHATS = [{"messages": chat(n)} for n in range(16)]
PREFERENCES = [{"prompt": f"Colour {n}?", "chosen": "It is red.", "rejected": "It is green."} for n in range(16)]
WINDOW = ["--max_seq_length", "96", "--doc_stride", "16"]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(name: str, config: str | None = None, cache_dir: Any = None, token: Any = None) -> dict[str, Any]:
        ASKED.append((name, config, token))
        if config == "mnli":
            return {split: [*map(pair, range(16))] for split in ("train", *MNLI)}
        if name == "gone":
            raise FileNotFoundError("Couldn't reach the hub\nand more")
        rows = SQUAD if name == "squad" else PAIRS
        return {"train": rows, "validation": rows}

    monkeypatch.setattr("stoker.tasks.hub.import_package", lambda wanted: SimpleNamespace(load_dataset=load_dataset))


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        (["qa", "--dataset_name", "squad", *WINDOW], ("squad", None)),
        (["classify", "--task_name", "mrpc"], ("nyu-mll/glue", "mrpc")),
    ],
)
def test_a_hub_data_set_is_trained_on(
    hub: None, tmp_path: Path, words: list[str], asked: tuple[str, str | None]
) -> None:
    assert trained_f1(tmp_path, words) >= 0
    assert (*asked, None) in ASKED


def test_the_token_is_used_for_data_sets_too(hub: None, tmp_path: Path) -> None:
    trained_f1(tmp_path, ["classify", "--task_name", "mrpc", "--token", "hf_x"])
    assert ASKED[-1] == ("nyu-mll/glue", "mrpc", "hf_x")


def test_mnli_uses_both_matched_and_mismatched_sets(hub: None, tmp_path: Path) -> None:
    trained_f1(tmp_path, ["classify", "--task_name", "mnli", "--do_predict", "--metric_name", "f1"])
    results = json.loads((tmp_path / "out" / "eval_results.json").read_text())
    assert {"eval_f1", "eval_f1_mm", "eval_loss_mm", "eval_samples_mm"} <= set(results)
    assert results["eval_f1_mm"] == results["eval_f1"]  # the stand-in's are the same rows
    for name in ("predict_results.txt", "predict_results_mm.txt"):
        assert len((tmp_path / "out" / name).read_text().splitlines()) == 17


@REAL
def test_classes_keep_their_names_and_order(tmp_path: Path) -> None:
    names = ["not_equivalent", "equivalent"]  # not in the order of the alphabet
    kinds: dict[str, Any] = {column: {"dtype": "string", "_type": "Value"} for column in ("sentence1", "sentence2")}
    kinds |= {"label": {"names": names, "_type": "ClassLabel"}, "idx": {"dtype": "int64", "_type": "Value"}}
    facts = {"huggingface": json.dumps({"info": {"features": kinds}})}  # where the package keeps what columns are
    (tmp_path / "data").mkdir()
    for split in ("train", "validation", "test"):
        rows = [{**row, "label": -1} for row in PAIRS] if split == "test" else PAIRS
        table = pyarrow.Table.from_pylist(rows).replace_schema_metadata(facts)
        parquet.write_table(table, tmp_path / "data" / f"{split}.parquet")
    words = [
        "classify",
        "--dataset_name",
        str(tmp_path / "data"),
        "--cache_dir",
        str(tmp_path / "cache"),
        "--do_predict",
    ]
    trained_f1(tmp_path, words)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["id2label"] == {"0": names[0], "1": names[1]}
    lines = (tmp_path / "out" / "predict_results.txt").read_text().splitlines()
    assert {line.split("\t")[1] for line in lines[1:]} <= set(names)


def test_hub_labels_may_be_missing_or_regression_targets() -> None:
    from stoker.tasks.hub import Split

    split = Split("d[train]", [{"label": -1}, {"label": 1}, {"label": None}], {"label": ("bad", "good")})
    assert [row.values["label"] for row in split.rows()] == [None, "good", None]
    assert [row.values["label"] for row in split.rows(named=False)] == [None, 1, None]


@REAL
@pytest.mark.parametrize(
    ("task", "rows", "more", "score"),
    rest_in(
        "tasks",
        [
            ("ner", TAGGED, WINDOW, "f1"),
            ("embed", PAIRS, ["--samples", "0"], "cosine_ap"),
            ("sft", CHATS, ["--samples", "0"], "perplexity"),
            ("qa", SQUAD, WINDOW, "f1"),
            ("classify", PAIRS, [], "f1"),
            ("mlm", TEXTS, ["--max_seq_length", "16"], "perplexity"),
            ("rerank", PAIRS, ["--samples", "0"], "average_precision"),
            ("sft", PREFERENCES, ["--samples", "0", "--dpo"], "rewards/accuracies"),
        ],
        keep=3,
    ),
)
def test_a_data_set_in_a_folder_is_read_by_the_real_package(
    tmp_path: Path,
    task: str,
    rows: list[dict[str, Any]],
    more: list[str],
    score: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    if task in ("embed", "rerank"):
        pytest.importorskip("sentence_transformers", reason="needs the extra embed")
    if task == "sft":
        pytest.importorskip("trl", reason="needs the extra sft")
    (tmp_path / "data").mkdir()
    for split in ("train", "validation"):
        parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "data" / f"{split}.parquet")
    words = [task, "--dataset_name", str(tmp_path / "data"), "--cache_dir", str(tmp_path / "cache"), *more]
    assert trained_score(tmp_path, words, score) >= 0
    assert "examples/s" not in capfd.readouterr().err  # bars are for terminals


def trained_f1(folder: Path, words: list[str]) -> float:
    return trained_score(folder, words, "f1")


def trained_score(folder: Path, words: list[str], score: str) -> float:
    model = save_tiny_llama(folder / "llama") if words[0] == "sft" else save_tiny_bert(folder / "bert")
    shared = ["--model_name_or_path", str(model), "--do_train", "--do_eval", "--max_steps", "1", "--report_to", "none"]
    assert main(["train", *words, *shared, "--output_dir", str(folder / "out")]) == 0
    return float(json.loads((folder / "out" / "eval_results.json").read_text())[f"eval_{score}"])


def test_a_data_set_that_cannot_be_loaded_is_reported_in_one_sentence(
    hub: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bert = save_tiny_bert(tmp_path / "bert")
    words = ["train", "qa", "--model_name_or_path", str(bert), "--do_train", "--output_dir", str(tmp_path / "o")]
    assert main([*words, "--dataset_name", "gone"]) == 2
    error = capsys.readouterr().err
    assert "the data set gone cannot be loaded: Couldn't reach the hub; without a network" in error
    assert "and more" not in error
    assert main([*words, "--do_predict", "--dataset_name", "squad"]) == 2
    assert "has no split 'test'; it has train, validation" in capsys.readouterr().err
