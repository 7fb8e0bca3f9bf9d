"""Records which functions of Stoker each test executes, in its own process and in all that it starts.

`start()` is called by every Python process of such a run (start/sitecustomize.py). A process appends each function to
$STOKER_REACH when it is first called, so a process that is killed loses nothing. What a fixture executes counts for all tests
of its file, since fixtures are shared. `read` returns the recorded table.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

_SOURCE = f"{os.sep}src{os.sep}stoker{os.sep}"
_seen: set[int] = set()


def start() -> None:
    threading.settrace(_trace)
    sys.settrace(_trace)


def new_test() -> None:
    """From here on every function is recorded again."""
    _seen.clear()


def _trace(frame: FrameType, event: str, arg: object) -> None:
    code = frame.f_code
    if id(code) in _seen:
        return
    _seen.add(id(code))
    _, mark, name = code.co_filename.partition(_SOURCE)
    test = os.environ.get("PYTEST_CURRENT_TEST")
    target = os.environ.get("STOKER_REACH")
    if mark and test and target:
        line = f"{test}\t{name}\t{code.co_firstlineno}\n"
        # Opened each time: tests count and close descriptors.
        file = os.open(target, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        os.write(file, line.encode())
        os.close(file)


def read(path: Path) -> Mapping[tuple[str, int], set[str]]:
    """(file below src/stoker, first line of a function) -> tests, or whole files where a fixture called it."""
    found: dict[tuple[str, int], set[str]] = defaultdict(set)
    with path.open() as lines:
        for line in lines:
            test, file, number = line.rstrip("\n").rsplit("\t", 2)
            name, _, phase = test.rpartition(" ")
            found[file, int(number)].add(name if phase == "(call)" else name.partition("::")[0])
    return found
