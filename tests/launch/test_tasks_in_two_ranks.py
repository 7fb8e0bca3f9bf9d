"""`stoker train` in two processes: every task trains, evaluates and predicts to its end, as in one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from live import STOKER, environment, lost_output

from parts import rest_in
from rig import warm
from stoker.tasks.demo.world import as_squad, make_world
from tasks.models import save_tiny_bert


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and data of each task; an odd number of rows, so that the ranks' shares differ."""
    folder = tmp_path_factory.mktemp("world")
    save_tiny_bert(folder / "bert")
    (folder / "qa.json").write_text(json.dumps(as_squad(make_world(21, seed=1, training=True))))
    rows = [{"sentence": f"word {n} is here", "label": ["no", "yes"][n % 2]} for n in range(21)]
    (folder / "classify.json").write_text(json.dumps(rows))
    tagged = [{"tokens": ["Ada", "wrote", str(n)], "ner_tags": ["B-PER", "O", "O"]} for n in range(21)]
    (folder / "ner.json").write_text(json.dumps(tagged))
    (folder / "mlm.json").write_text(json.dumps([{"text": row["sentence"]} for row in rows]))
    return folder


OPTIONS = {
    "classify": ["--do_predict", "--max_seq_length", "96"],
    "qa": ["--do_predict", "--max_seq_length", "96", "--doc_stride", "16"],
    "ner": ["--do_predict", "--max_seq_length", "96", "--doc_stride", "16"],
    "fewshot": ["--do_predict", "--max_seq_length", "96"],
    "mlm": ["--line_by_line", "--max_seq_length", "32"],
}
PREDICTIONS: dict[str, tuple[str, Callable[[str], int]]] = {
    "classify": ("predict_results.txt", lambda text: len(text.splitlines()) - 1),
    "qa": ("predict_predictions.json", lambda text: len(json.loads(text))),
    "fewshot": ("predict_results.txt", lambda text: len(text.splitlines()) - 1),
    "ner": ("predictions.jsonl", lambda text: len(text.splitlines())),
}
"""Where the predictions are, and how many a file has."""


@pytest.mark.parametrize("task", rest_in("tasks", sorted(OPTIONS, key=["ner"].count, reverse=True)))
def test_a_task_finishes_in_two_ranks(world: Path, tmp_path: Path, task: str) -> None:
    if task == "fewshot":
        pytest.importorskip("setfit", reason="needs the extra fewshot")
    data, out = str(world / f"{'classify' if task == 'fewshot' else task}.json"), tmp_path / "out"
    words = [
        "launch", "-n", "2", "-m", "stoker", "train", task, "--model_name_or_path", str(world / "bert"), "--do_train",
        "--do_eval", "--train_file", data, "--validation_file", data,
        "--max_steps", "2", "--per_device_train_batch_size", "4", "--report_to", "none", "--ddp_timeout", "120",
        "--output_dir", str(out), *OPTIONS[task], *(["--test_file", data] if "--do_predict" in OPTIONS[task] else []),
    ]  # fmt: skip
    # As batch systems have it, and as `| head -1` ends it: neither may end the training.
    kept = task != "classify"
    log = os.open(tmp_path / "log", os.O_RDWR | os.O_CREAT) if kept else lost_output("no reader")
    done = warm.run([*STOKER, *words], env=environment(), stdout=log, stderr=log, timeout=400, check=False)
    os.close(log)
    shown = (tmp_path / "log").read_text() if kept else ""
    assert done.returncode == 0, shown[-3000:]
    assert ("trained to step 2" in shown) == kept
    results = json.loads((out / "eval_results.json").read_text())
    assert results["eval_samples"] == 21
    if task in PREDICTIONS:
        file, count = PREDICTIONS[task]
        assert count((out / file).read_text()) == 21
    entries = [json.loads(line) for line in (out / "run.jsonl").read_text().splitlines()]
    assert any(entry["kind"] == "examples" and entry["rows"] for entry in entries)
    assert (out / "report.html").exists()
