"""Every line has a rank prefix, only rank 0 shows progress bars, and no output is lost in a crash."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.launch.rank.output import Lines


@given(st.binary(max_size=60).map(lambda data: data.replace(b"\r", b"")), st.lists(st.integers(0, 60), max_size=6))
def test_each_line_gets_one_prefix_however_the_stream_is_split(data: bytes, cuts: list[int]) -> None:
    lines, shown, begin = Lines(b"[3] ", progress=False), b"", 0
    for cut in [*sorted(min(cut, len(data)) for cut in cuts), len(data)]:
        shown += lines.feed(data[begin:cut])
        begin = cut
    shown += lines.end()
    expected = data.split(b"\n")
    if expected[-1] == b"":
        expected.pop()
    assert shown == b"".join(b"[3] " + line + b"\n" for line in expected)


BAR = b"\r  0%|  | 0/2\r 50%|# | 1/2\r100%|##| 2/2\n"


def test_a_progress_bar_of_another_rank_is_not_shown() -> None:
    lines = Lines(b"[1] ", progress=False)
    assert lines.feed(b"before\n" + BAR + b"after\n") == b"[1] before\n[1] after\n"


def test_the_progress_bar_of_rank_0_is_shown_unchanged() -> None:
    lines = Lines(b"[0] ", progress=True)
    shown = lines.feed(b"before\n" + BAR[:20])
    shown += lines.pause()
    shown += lines.feed(BAR[20:] + b"after\n")
    assert shown.startswith(b"[0] before\n")
    assert shown.endswith(b"\n[0] after\n")
    assert b"50%" in shown
    assert b"100%|##| 2/2\n" in shown
    assert b"[0]  50%" not in shown


def test_advice_about_a_default_is_not_repeated_by_every_rank() -> None:
    advice = b"[rank1]:[W1118 reducer.cpp:1457] Warning: find_unused_parameters=True was specified in DDP constructor, but did"
    advice += b" not find any unused parameters in the forward pass. (function operator())\n"
    assert Lines(b"[1] ", progress=False).feed(b"before\n" + advice + b"after\n") == b"[1] before\n[1] after\n"


def test_windows_line_endings_are_recognised() -> None:
    assert Lines(b"[1] ", progress=False).feed(b"a\r\nb\n") == b"[1] a\n[1] b\n"


SCRIPT = """
import os, sys
from pathlib import Path
from stoker.launch.rank.output import attach
attach("[7] ", Path(sys.argv[1]), progress=False)
print("said"); print("wrong", file=sys.stderr)
os.write(1, b"no newline")
how = sys.argv[2]
if how == "kill": os.kill(os.getpid(), 9)
if how == "fork":
    if os.fork() == 0: os.closerange(0, 3); import time; time.sleep(1); os._exit(0)
if how == "wait":
    try: os.wait()
    except ChildProcessError: print("\\nno child")
"""


@pytest.mark.parametrize(("how", "code"), [("end", 0), ("kill", -9), ("fork", 0)])
def test_the_last_output_arrives_however_a_rank_ends(how: str, code: int, tmp_path: Path) -> None:
    log = tmp_path / "new" / "rank_7.log"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(log), how], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == code
    assert "[7] said\n" in done.stdout
    assert "[7] no newline" in done.stdout
    assert done.stderr == "[7] wrong\n"
    assert "said" in log.read_text()
    assert "wrong" in log.read_text()
    assert "[7]" not in log.read_text()


def test_streams_can_be_reconfigured_where_the_output_is_a_file(tmp_path: Path) -> None:
    script = (
        SCRIPT + "\nfor stream in (sys.stdout, sys.stderr): stream.reconfigure(errors='replace')\nprint('still here')\n"
    )
    with open(tmp_path / "out", "w") as out:
        done = subprocess.run(
            [sys.executable, "-c", script, str(tmp_path / "log"), "end"], stdout=out, stderr=out, check=False
        )
    assert done.returncode == 0
    assert "still here" in (tmp_path / "log").read_text()


def test_the_forwarder_is_not_a_child_of_the_rank(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "log"), "wait"], capture_output=True, text=True, check=True
    )
    assert "no child" in done.stdout
