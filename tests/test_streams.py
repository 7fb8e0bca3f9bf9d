"""Output that cannot be written never ends a process, and text never continues the line of a progress bar."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stoker.streams import ProgressLine

SCRIPT = """
import logging, os, subprocess, sys
from stoker import streams
streams.keep_running()
for number in range(3):
    print("out", number, flush=True)
    print("error", number, file=sys.stderr)
    logging.warning("logged %d", number)
sys.stdout.buffer.write(b"bytes")
sys.stdout.write("x" * 100_000)
for stream in (sys.stdout, sys.stderr):
    stream.reconfigure(errors="replace")
with open(sys.argv[1], "w") as file:
    assert file.fileno() > 2, "a file took the number of a closed stream"
    print(subprocess.run("echo child; echo child >&2", shell=True, check=False).returncode, file=file, end="")
"""


def redirected(kind: str, tmp_path: Path) -> int:
    """A descriptor that takes no output."""
    if kind == "full disk":
        return os.open("/dev/full", os.O_WRONLY)
    if kind == "file":
        return os.open(tmp_path / "file", os.O_WRONLY | os.O_CREAT)
    read, write = os.pipe()
    os.close(read)
    return write


@pytest.mark.parametrize("kind", ["no reader", "full disk", "closed", "file"])
def test_a_process_succeeds_even_if_its_output_cannot_be_written(kind: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "end")]
    if kind == "closed":
        done = subprocess.run(["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command], check=False)
    else:
        target = redirected(kind, tmp_path)
        done = subprocess.run(command, stdout=target, stderr=target, check=False)
        os.close(target)
    assert done.returncode == 0
    assert (tmp_path / "end").exists()
    if kind == "file":
        text = (tmp_path / "file").read_text()
        assert all(f"out {n}\n" in text and f"error {n}\n" in text and f"logged {n}\n" in text for n in range(3))
        assert "x" * 100_000 in text
    elif kind != "full disk":  # what a child does about a full disk is its own affair
        assert (tmp_path / "end").read_text() == "0"


def test_writing_continues_once_it_is_possible_again(tmp_path: Path) -> None:
    """A full disk may have room again; only a reader that has gone never comes back."""
    script = """
import resource, signal, sys
from stoker import streams
streams.keep_running()
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
print("before", flush=True)
resource.setrlimit(resource.RLIMIT_FSIZE, (7, resource.RLIM_INFINITY))
print("lost", flush=True)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print("after", flush=True)
"""
    with open(tmp_path / "log", "w") as log:
        subprocess.run([sys.executable, "-c", script], stdout=log, check=True)
    assert (tmp_path / "log").read_text() == "before\nafter\n"


def shown(*pieces: bytes) -> bytes:
    line = ProgressLine()
    return b"".join(line.before(piece) + piece for piece in pieces)


def test_text_after_a_progress_bar_starts_on_a_new_line() -> None:
    assert shown(b"\r 50%|# |", b"log line\n", b"\r100%|##|", b"\n", b"end\n") == (
        b"\r 50%|# |\nlog line\n\r100%|##|\nend\n"
    )
    assert shown(b"\r 50%|# |", b"by", b" pieces\n") == b"\r 50%|# |\nby pieces\n"


@pytest.mark.parametrize(
    "pieces",
    [
        [b"\r 10%", b"\r 20%", b"\n", b"text\n"],
        [b"\r 10%", b"\r     \r", b"text over a cleared bar\n"],
        [b"\n", b"\r 10% of a second bar", b"\x1b[A", b"\r 20% of the first"],
        [b"no line end, ", b"but no bar either\n"],
        [b"windows\r\n", b"text\r\n"],
        [b"\x1b[?25l\r\x1b[2K", b"text\n"],
        [b"\r 10%", b"", b"\r      \r", b"", b"text\n", b"\r 10%"],  # tqdm.write
    ],
)
def test_other_output_is_unchanged(pieces: list[bytes]) -> None:
    assert shown(*pieces) == b"".join(pieces)


def test_processes_that_share_a_screen_share_its_progress_bar(tmp_path: Path) -> None:
    mine, other = ProgressLine(tmp_path / "shared"), ProgressLine(tmp_path / "shared")
    assert mine.before(b"\r 50%") == b""
    assert other.before(b"line\n") == b"\n"
    assert mine.before(b"line\n") == b""


def test_a_print_does_not_continue_a_bar_on_the_other_stream(tmp_path: Path) -> None:
    script = """
import logging, sys
from stoker import streams
streams.keep_running()
from tqdm import tqdm
for number in tqdm(range(2), file=sys.stderr):
    print("printed", flush=True)
    logging.warning("logged")
"""
    with open(tmp_path / "log", "w") as log:
        subprocess.run([sys.executable, "-c", script], stdout=log, stderr=log, check=True)
    text = (tmp_path / "log").read_text()
    assert text.count("\nprinted\n") == 2, text
    assert text.count("\nWARNING:root:logged\n") == 2, text
