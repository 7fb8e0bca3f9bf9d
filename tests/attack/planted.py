"""Cases that do what no command may do, to check that the attack detects it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from attack.case import Case

__all__ = ["PLANTED", "planted"]


def _raise() -> None:
    raise RuntimeError("planted")


def _in_tmp() -> None:
    Path(os.environ["TMPDIR"], "left").touch()


def _shared_memory() -> None:
    Path("/dev/shm/planted").touch()


def _process() -> None:
    subprocess.Popen(["sleep", "1000"], start_new_session=True)


def _long() -> None:
    print("line\n" * 50, file=sys.stderr)
    os._exit(2)


PLANTED: dict[str, Callable[[], None]] = {
    "traceback": _raise,
    "crash": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "code": lambda: os._exit(7),
    "silent": lambda: os._exit(2),
    "message": _long,
    "leftover: tmp/left": _in_tmp,
    "leftover: cwd/new": lambda: Path("new").touch(),
    "leftover: cwd/input was changed": lambda: Path("input").write_text("changed"),
    "leftover: process sleep": _process,
    "leftover: /dev/shm/planted": _shared_memory,
}
"""The failure that must be detected, and what causes it."""


def planted(number: int) -> Case:
    return Case(["--version"], {"input": b"x"}, prepare=list(PLANTED.values())[number])
