"""Failures that Stoker knows how to avoid get one line after the traceback; others get none."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from stoker.launch.rank.hints import hints


def test_an_unreachable_hub_points_to_local_files_and_own_metrics() -> None:
    error = OSError("We couldn't connect to 'https://huggingface.co' to load the files")
    assert "cannot be reached" in hints(error, [])[0]
    outer = RuntimeError("loading failed")
    outer.__cause__ = ConnectionError("refused")
    assert "stoker train qa" in hints(outer, [])[0]


def test_a_missing_evaluate_gets_a_hint() -> None:
    assert "pip install evaluate" in hints(ModuleNotFoundError("no", name="evaluate"), [])[0]


@pytest.mark.parametrize("name", ["train-v1.1.json", "train-v1.1.json.gz"])
def test_nested_squad_is_recognised(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    text = json.dumps({"version": "1.1", "data": [{"title": "T", "paragraphs": []}]}).encode()
    path.write_bytes(gzip.compress(text) if name.endswith("gz") else text)
    assert "official nested form" in hints(KeyError("question"), ["--train_file", str(path)])[0]


def test_nested_squad_is_not_blamed_for_other_failures(tmp_path: Path) -> None:
    path = tmp_path / "dev.json"
    path.write_text(json.dumps({"data": [{"paragraphs": []}]}))
    assert hints(OSError("Illegal seek"), [str(path)]) == []
    assert hints(KeyError("x"), ["train", "qa", "--train_file", str(path)], "stoker") == []


def test_other_failures_get_no_hint(tmp_path: Path) -> None:
    flat = tmp_path / "flat.json"
    flat.write_text(json.dumps({"data": [{"question": "?"}]}))
    assert hints(ValueError("x"), [str(flat), "missing.json", "--x"]) == []


def test_looking_for_a_hint_never_blocks_or_fails(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "torn.json.gz").write_bytes(gzip.compress(b"x" * 5000)[:10] + b"\xff" * 50)
    words = [str(tmp_path / "pipe.json"), str(tmp_path / "torn.json.gz"), str(tmp_path), "a\0.json"]
    assert hints(KeyError("question"), words) == []
