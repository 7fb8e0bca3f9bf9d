"""`stoker train --live` serves the page of the run that it starts, shows how it ends, and leaves no process behind."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rig import warm
from run_report.live_events import Events
from stoker.cli import main
from stoker.run_report.log import RunLog
from tasks.models import save_tiny_bert

TEXTS = ["The river Ane flows through Torwick", "Who founded the town?", "It was founded in 1832"]


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("live")
    rows = [{"text": TEXTS[i % 3], "label": str(i % 3)} for i in range(30)]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    bert = save_tiny_bert(folder / "bert")
    return ["train", "classify", "--model_name_or_path", str(bert), "--train_file", str(folder / "train.jsonl"), "--do_train",
            "--report_to", "none", "--logging_steps", "1", "--per_device_train_batch_size", "2", "--live"]  # fmt: skip


def address_in(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search(r"watch it at (http://127\.0\.0\.1:\d+/[\w-]+/)", line):
            return found[1]
    raise AssertionError("the command ended without an address")


def watchers(folder: Path) -> list[str]:
    """The processes that serve the page of a run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"watch" in words and os.fsencode(folder) in words:
            found.append(path.parent.name)
    return found


def test_a_run_is_shown_from_its_start_until_it_is_killed(command: list[str], tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.write("start", title="an earlier run")
    log.write("end", reason="finished")
    process = warm.Popen(
        [sys.executable, "-m", "stoker", *command, "--output_dir", str(tmp_path), "--max_steps", "100000",
         "--overwrite_output_dir"],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, transformers=True,
    )  # fmt: skip
    try:
        events = Events(address_in(process))
        events.until("pill", "header")
        assert "an earlier run" not in events.parts["header"]
        process.stderr.close()  # type: ignore[union-attr]
        events.until("running", "header")
        events.until("of 100,000 steps")
        events.until("left")
        assert events.parts["charts"][0]["id"] == "loss"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert "event: end" in events.rest()
    assert ">killed<" in events.parts["header"]
    deadline = time.monotonic() + 60
    while watchers(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert watchers(tmp_path) == []


@pytest.mark.part("tasks")
def test_of_several_ranks_only_the_first_serves(command: list[str], tmp_path: Path) -> None:
    process = warm.Popen(
        [sys.executable, "-m", "stoker", "launch", "-n", "2", "-m", "stoker", *command, "--output_dir", str(tmp_path),
         "--max_steps", "30"],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    events = Events(address_in(process))
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert "watch it at" not in errors
    events.rest()
    assert ">finished<" in events.parts["header"]
    assert "waited for" in events.parts["waits"]
    assert {"loss", "throughput"} <= {chart["id"] for chart in events.parts["charts"]}


def test_a_port_in_use_is_found_before_anything_is_loaded(
    command: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = str(busy.getsockname()[1])
        assert main([*command, "--output_dir", str(tmp_path), "--live_port", port]) == 2
    errors = capfd.readouterr().err
    announced, error = errors.splitlines()
    assert announced.startswith("loading ")
    assert f"--live: port {port} of 127.0.0.1 is in use; choose another --live_port" in error
    assert list(tmp_path.iterdir()) == []
