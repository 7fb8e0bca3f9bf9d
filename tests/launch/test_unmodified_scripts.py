"""Unmodified scripts under `stoker launch`, of sentence-transformers and token classification: losses of stock, our figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from live import SCRIPTS, launch

from parts import rest_in
from tasks.models import save_tiny_bert
from tasks.sentence_files import COLOURS, rows_of


def _log(*words: str) -> list[dict[str, Any]]:
    done = launch(*words, env={"HF_HUB_OFFLINE": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("LOG "))[4:])


def _rows(kind: str) -> list[dict[str, Any]]:
    if kind == "entities":
        tokens = [row["text"].rstrip(".").split() for row in rows_of("labelled texts")]
        return [{"tokens": one, "ner_tags": ["B-COL" if word in COLOURS else "O" for word in one]} for one in tokens]
    return [{**row, "score": row["score"] / 5} for row in rows_of("pairs with scores")]


SCORES = {
    "embedding": "eval_dev_spearman_cosine",
    "reranker": "eval_dev_spearman",
    "entities": "eval_accuracy",
}


@pytest.mark.parametrize("kind", rest_in("launch", SCORES))
def test_an_unmodified_script_learns_as_stock(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("datasets" if kind == "entities" else "sentence_transformers", reason="needs the extra embed")
    bert = save_tiny_bert(tmp_path / "bert")
    config = json.loads((bert / "config.json").read_text())
    config |= {
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }  # the random numbers differ from stock's
    (bert / "config.json").write_text(json.dumps(config))
    (tmp_path / "rows.json").write_text(json.dumps(_rows(kind)))
    script = ["token_style.py"] if kind == "entities" else ["sentence_style.py", kind]
    words = (str(SCRIPTS / script[0]), *script[1:], str(bert), str(tmp_path / "rows.json"))
    stock = _log("--no-compat", *words, str(tmp_path / "stock"))
    ours = _log(*words, str(tmp_path / "ours"))
    for key in ("loss", "grad_norm", "eval_loss", SCORES[kind]):
        expected = [entry[key] for entry in stock if key in entry]
        assert len(expected) == (2 if key.startswith("eval") else 4), (key, stock)
        assert [entry[key] for entry in ours if key in entry] == pytest.approx(expected, rel=2e-3, abs=2e-4), key
    assert not any("tokens_per_second" in entry for entry in stock)
    measured = [entry for entry in ours if "loss" in entry]
    assert all(entry["tokens_per_second"] > 0 and entry["padding_avoided"] > 0 for entry in measured), ours
    assert (tmp_path / "ours" / "final" / "model.safetensors").exists()
