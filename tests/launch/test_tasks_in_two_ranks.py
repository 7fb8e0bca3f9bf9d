"""`stoker train` in two processes: every task trains, evaluates and predicts to its end, as in one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from live import launch

from stoker.tasks.demo.world import as_squad, make_world
from tasks.models import save_tiny_bert


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and data of either task; an odd number of rows, so that the ranks' shares differ."""
    folder = tmp_path_factory.mktemp("world")
    save_tiny_bert(folder / "bert")
    (folder / "qa.json").write_text(json.dumps(as_squad(make_world(21, seed=1, training=True))))
    rows = [{"sentence": f"word {n} is here", "label": ["no", "yes"][n % 2]} for n in range(21)]
    (folder / "classify.json").write_text(json.dumps(rows))
    return folder


@pytest.mark.parametrize("task", ["classify", "qa"])
def test_a_task_runs_to_its_end(world: Path, tmp_path: Path, task: str) -> None:
    data, out = str(world / f"{task}.json"), tmp_path / "out"
    done = launch(
        "-n", "2", "-m", "stoker", "train", task, "--model_name_or_path", str(world / "bert"), "--do_train", "--do_eval",
        "--do_predict", "--train_file", data, "--validation_file", data, "--test_file", data, "--max_seq_length", "96",
        "--max_steps", "2", "--per_device_train_batch_size", "4", "--report_to", "none", "--ddp_timeout", "120",
        "--output_dir", str(out), *(["--doc_stride", "16"] if task == "qa" else []),
        timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads((out / "eval_results.json").read_text())
    assert results["eval_samples"] == 21
    if task == "qa":
        assert len(json.loads((out / "predict_predictions.json").read_text())) == 21
    else:
        assert len((out / "predict_results.txt").read_text().splitlines()) == 22
    entries = [json.loads(line) for line in (out / "run.jsonl").read_text().splitlines()]
    assert any(entry["kind"] == "examples" and entry["rows"] for entry in entries)
    assert (out / "report.html").exists()
