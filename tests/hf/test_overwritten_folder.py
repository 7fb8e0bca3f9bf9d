"""`overwrite_output_dir` is mentioned where there are checkpoints that are not used, and nowhere else."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from hf import tiny
from stoker.run_report.log import NAME

SETTINGS: dict[str, Any] = {"max_steps": 2, "save_steps": 1}
NOTE = "overwrite_output_dir: the checkpoints in"


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING, logger="stoker")
    return caplog


def test_overwriting_an_empty_folder_is_not_mentioned(tree_path: Path, logged: pytest.LogCaptureFixture) -> None:
    tiny.trainer(tree_path, **SETTINGS, overwrite_output_dir=True).train()
    assert "overwrite_output_dir" not in logged.text


def test_checkpoints_that_are_not_used_are_mentioned(tree_path: Path, logged: pytest.LogCaptureFixture) -> None:
    tiny.trainer(tree_path, **SETTINGS).train()
    tiny.trainer(tree_path, **SETTINGS, overwrite_output_dir=True).train()
    assert logged.text.count(NOTE) == 1


def test_a_restarted_run_does_not_claim_to_start_over(
    tree_path: Path, logged: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STOKER_RUN_ID", "job-1")
    tiny.trainer(tree_path, **SETTINGS).train()
    lines = [json.loads(line) for line in (tree_path / NAME).read_text().splitlines()]
    killed = [
        {**line, "processes": [1]} if line["kind"] == "start" else line for line in lines if line["kind"] != "end"
    ]
    (tree_path / NAME).write_text("".join(json.dumps(line) + "\n" for line in killed))
    tiny.trainer(tree_path, **{**SETTINGS, "max_steps": 3}, overwrite_output_dir=True).train()
    assert "restarted by the scheduler; resuming from" in logged.text
    assert NOTE not in logged.text
