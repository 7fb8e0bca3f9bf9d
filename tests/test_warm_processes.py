"""Processes that tests fork from a server (rig.warm) behave like those that are started normally."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rig import warm

STATE = """
import json, os, signal, sys, threading
print(json.dumps({
    "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "name": __name__, "file": globals().get("__file__"),
    "cwd": os.getcwd(), "own": os.environ.get("OWN"), "input": sys.stdin.read(), "parent": os.getppid(),
    "own_session": os.getsid(0) == os.getpid(), "open": sorted(os.listdir("/proc/self/fd")),
    "cores": sorted(os.sched_getaffinity(0)),
    "command": open("/proc/self/cmdline").read().rstrip(chr(0)), "in_proc": "OWN=my own" in open("/proc/self/environ").read(),
    "modules": sorted(n for n in sys.modules if n.partition(".")[0] in ("torch", "transformers", "stoker")),
    "signals": {s.name: str(signal.getsignal(s)).partition(" at ")[0] for s in signal.Signals},
    "threads": threading.active_count(), "buffered": [sys.stdout.line_buffering, sys.stderr.line_buffering],
}))
"""
TORCH = """
import importlib.util
print(importlib.util.find_spec("torch").origin)
import torch.nn.functional as F, torch, sys
print(torch.get_num_threads(), F is torch.nn.functional, torch.__spec__.loader.__class__.__name__, "torch.nn" in sys.modules)
print(torch.ones(300, 300).mm(torch.ones(300, 300)).sum().item())
"""


def both(*command: str, **options: Any) -> tuple[subprocess.CompletedProcess[str], subprocess.CompletedProcess[str]]:
    words = [sys.executable, *command]
    given = {"capture_output": True, "text": True, "check": False, "timeout": 200, **options}
    return warm.run(words, **given), subprocess.run(words, **given)


def assert_same(pair: tuple[subprocess.CompletedProcess[str], subprocess.CompletedProcess[str]]) -> None:
    forked, started = pair
    assert (forked.returncode, forked.stdout, forked.stderr) == (started.returncode, started.stdout, started.stderr)


@pytest.mark.parametrize("how", ["script", "-c", "-m"])
def test_a_program_finds_the_same_state(tmp_path: Path, how: str) -> None:
    (tmp_path / "state.py").write_text(STATE)
    command = {"script": [str(tmp_path / "state.py")], "-c": ["-c", STATE], "-m": ["-m", "state"]}[how]
    environment = {**os.environ, "OWN": "my own"}
    pair = both(*command, "a b", "", "-x", cwd=tmp_path, env=environment, input="words", start_new_session=True)
    assert_same(pair)
    assert '"argv"' in pair[0].stdout


@pytest.mark.parametrize(
    "code",
    [
        "import sys; sys.exit(7)",
        "import sys; sys.exit('a message')",
        "def f():\n    1 / 0\nf()",
        "f(",
        "raise KeyboardInterrupt",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "import atexit; atexit.register(print, 'at exit'); print('x', end='')",
        "import threading, time; threading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start(); print('main')",
        "import os, sys; os.execve(sys.executable, [sys.executable, '-c', 'print(1)'], dict(os.environ))",
    ],
)
def test_a_program_ends_in_the_same_way(code: str) -> None:
    forked, started = both("-c", code)
    assert (forked.returncode, forked.stdout) == (started.returncode, started.stdout)
    if "KeyboardInterrupt" in code:
        assert forked.stderr.endswith("\nKeyboardInterrupt\n")
    else:
        assert forked.stderr == started.stderr


@pytest.mark.parametrize("threads", [None, "1", "3"])
def test_torch_is_imported_as_if_for_the_first_time(threads: str | None) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    assert_same(both("-c", TORCH, env=environment if threads is None else {**environment, "OMP_NUM_THREADS": threads}))


def test_random_numbers_differ_between_processes() -> None:
    code = "import random, numpy, torch; print(random.random(), numpy.random.rand(), torch.rand(1).item())"
    drawn = [
        warm.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout for _ in range(2)
    ]
    assert not set(drawn[0].split()) & set(drawn[1].split())


def test_a_warm_process_is_a_child_that_can_be_waited_for_and_ended() -> None:
    process = warm.Popen(
        [sys.executable, "-c", "print(1, flush=True); import time; time.sleep(100)"], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"1\n"
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=0.01)
    process.terminate()
    assert process.wait() == -signal.SIGTERM
    process.stdout.close()


def test_other_programs_are_started_as_usual() -> None:
    assert warm.run(["sh", "-c", "echo $0"], capture_output=True, text=True).stdout == "sh\n"
