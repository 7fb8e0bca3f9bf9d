"""Unmodified scripts of sentence-transformers under `stoker launch`: the losses of stock, and Stoker's figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from live import SCRIPTS, launch

pytest.importorskip("sentence_transformers", reason="needs the extra embed")

from tasks.models import save_tiny_bert
from tasks.sentence_files import rows_of


def _log(*words: str) -> list[dict[str, Any]]:
    done = launch(*words, env={"HF_HUB_OFFLINE": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("LOG "))[4:])


@pytest.mark.parametrize(
    ("kind", "score"), [("embedding", "eval_dev_spearman_cosine"), ("reranker", "eval_dev_spearman")]
)
def test_an_unmodified_script_of_sentence_transformers_learns_as_stock(tmp_path: Path, kind: str, score: str) -> None:
    bert = save_tiny_bert(tmp_path / "bert")
    config = json.loads((bert / "config.json").read_text())
    config |= {
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }  # the random numbers differ from stock's
    (bert / "config.json").write_text(json.dumps(config))
    rows = [{**row, "score": row["score"] / 5} for row in rows_of("pairs with scores")]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    words = (str(SCRIPTS / "sentence_style.py"), kind, str(bert), str(tmp_path / "rows.json"))
    stock = _log("--no-compat", *words, str(tmp_path / "stock"))
    ours = _log(*words, str(tmp_path / "ours"))
    for key in ("loss", "grad_norm", "eval_loss", score):
        expected = [entry[key] for entry in stock if key in entry]
        assert len(expected) == (2 if key.startswith("eval") else 4), (key, stock)
        assert [entry[key] for entry in ours if key in entry] == pytest.approx(expected, rel=2e-3, abs=2e-4), key
    assert not any("tokens_per_second" in entry for entry in stock)
    measured = [entry for entry in ours if "loss" in entry]
    assert all(entry["tokens_per_second"] > 0 and entry["padding_avoided"] > 0 for entry in measured), ours
    assert (tmp_path / "ours" / "final" / "model.safetensors").exists()
