"""Two runs in one output folder: the second is refused, and what a killed run leaves behind blocks no later run."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers

from hf import tiny
from stoker.errors import UserError
from stoker.hf.checkpointing import lock

HOLD = """
import os, sys, time
from pathlib import Path
from stoker.hf.checkpointing import lock
held = lock.take(Path(sys.argv[1]))
if "fork" not in sys.argv:
    print("locked", flush=True)
elif os.fork() == 0:
    print(os.getpid(), flush=True)  # the child says so itself: it has then closed what it inherited
time.sleep(600)
"""


class Holder:
    """Another process that has the lock of a folder."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(folder), *words], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        self.child = int(line) if line.isdigit() else None

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def held(tree_path: Path) -> Iterator[Holder]:
    holder = Holder(tree_path / "out")
    yield holder
    holder.kill()


def test_a_second_run_is_refused_and_changes_nothing(tree_path: Path, held: Holder) -> None:
    out = tree_path / "out"
    (out / ".checkpoint-2.partial").mkdir()  # what the first run is writing
    (out / "run.jsonl").write_text("{}\n")
    with pytest.raises(UserError) as refusal:
        tiny.trainer(out, max_steps=1).train()
    message = str(refusal.value)
    assert message.startswith(f"another run is training in {out} (process {held.process.pid} on ")
    assert "give another --output_dir" in message
    assert sorted(path.name for path in out.iterdir()) == [".checkpoint-2.partial", lock.NAME, "run.jsonl"]
    assert (out / "run.jsonl").read_text() == "{}\n"


def test_after_kill_9_the_folder_is_free_and_nothing_is_left_after_the_next_run(tree_path: Path, held: Holder) -> None:
    held.kill()
    assert (tree_path / "out" / lock.NAME).exists()
    tiny.trainer(tree_path / "out", max_steps=1).train()
    assert not (tree_path / "out" / lock.NAME).exists()


def test_workers_that_outlive_a_killed_run_do_not_keep_its_lock(tree_path: Path) -> None:
    holder = Holder(tree_path, "fork")
    assert holder.child is not None
    try:
        with pytest.raises(UserError):
            lock.take(tree_path)
        holder.kill()
        os.kill(holder.child, 0)  # it is still there
        lock.take(tree_path).release()
    finally:
        os.kill(holder.child, signal.SIGKILL)


def test_a_lock_taken_twice_by_one_process_is_released_with_the_second_release(tree_path: Path) -> None:
    outer, inner = lock.take(tree_path), lock.take(tree_path / "." / "x" / "..")
    inner.release()
    inner.release()
    assert (tree_path / lock.NAME).exists()
    outer.release()
    assert not (tree_path / lock.NAME).exists()


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EIO])
def test_a_run_continues_without_a_lock_where_locking_is_impossible(
    tree_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", fail)
    lock.take(tree_path).release()


def test_a_lock_file_that_is_not_a_regular_file_is_left_alone(tree_path: Path) -> None:
    (tree_path / lock.NAME).symlink_to(tree_path / "elsewhere")
    lock.take(tree_path).release()
    assert not (tree_path / "elsewhere").exists()
    (tree_path / lock.NAME).unlink()
    os.mkfifo(tree_path / lock.NAME)
    lock.take(tree_path).release()  # does not wait for a reader
    lock.take(Path("/proc/none")).release()


def test_trials_of_a_search_may_run_side_by_side(
    tree_path: Path, held: Holder, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = tiny.trainer(tree_path / "out")
    monkeypatch.setattr(transformers.Trainer, "train", lambda *args, **named: "trained")
    assert trainer.train(trial={"learning_rate": 1e-3}) == "trained"


def test_stoker_train_is_refused_with_exit_code_two_before_it_reads_any_data(
    tree_path: Path, held: Holder, capsys: pytest.CaptureFixture[str]
) -> None:
    from stoker.cli import main

    data = tree_path / "broken.json"
    data.write_text("{")  # reading it would fail
    words = f"train qa --model_name_or_path m --train_file {data} --do_train --output_dir {tree_path / 'out'}"
    assert main(words.split()) == 2
    assert f"another run is training in {tree_path / 'out'}" in capsys.readouterr().err
