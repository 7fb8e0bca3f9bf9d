"""Data sets of the hub take the same way as files: real ones from folders, names through a stand-in for the `datasets` package,
which would ask the hub."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow
import pyarrow.parquet as parquet
import pytest

from stoker.cli import main
from stoker.tasks.demo.world import make_world
from tasks.models import save_tiny_bert

ASKED: list[tuple[str, str | None]] = []


SQUAD = [
    {
        "id": q.id,
        "question": q.question,
        "context": q.context,
        "answers": {"text": list(q.answers), "answer_start": list(q.starts)},
    }
    for q in make_world(16, seed=1, training=True)
]
PAIRS = [{"sentence1": f"a {n}", "sentence2": f"b {n}", "label": n % 2, "idx": n} for n in range(16)]
WINDOW = ["--max_seq_length", "96", "--doc_stride", "16"]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(name: str, config: str | None = None, cache_dir: str | None = None) -> dict[str, Any]:
        ASKED.append((name, config))
        if name == "gone":
            raise FileNotFoundError("Couldn't reach the hub\nand more")
        rows = SQUAD if name == "squad" else PAIRS
        return {"train": rows, "validation": rows}

    monkeypatch.setattr("stoker.tasks.hub._package", lambda wanted: SimpleNamespace(load_dataset=load_dataset))


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
    assert asked in ASKED


@pytest.mark.parametrize(("task", "rows"), [("qa", SQUAD), ("classify", PAIRS)])
def test_a_data_set_in_a_folder_is_read_by_the_real_package(
    tmp_path: Path, task: str, rows: list[dict[str, Any]], capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data").mkdir()
    for split in ("train", "validation"):
        parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "data" / f"{split}.parquet")
    words = [
        task,
        "--dataset_name",
        str(tmp_path / "data"),
        "--cache_dir",
        str(tmp_path / "cache"),
        *(WINDOW if task == "qa" else []),
    ]
    assert trained_f1(tmp_path, words) >= 0
    assert "examples/s" not in capfd.readouterr().err  # bars are for terminals


def trained_f1(folder: Path, words: list[str]) -> float:
    bert = save_tiny_bert(folder / "bert")
    shared = ["--model_name_or_path", str(bert), "--do_train", "--do_eval", "--max_steps", "1", "--report_to", "none"]
    assert main(["train", *words, *shared, "--output_dir", str(folder / "out")]) == 0
    return float(json.loads((folder / "out" / "eval_results.json").read_text())["eval_f1"])


def test_a_data_set_that_cannot_be_had_is_one_sentence(
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
