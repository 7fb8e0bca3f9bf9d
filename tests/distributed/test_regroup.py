"""A process is killed while a group is formed again: the others notice, and form the next one with the process that follows."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from parts import rest_in
from rig import warm

SCRIPT = str(Path(__file__).with_name("regroup_process.py"))
LIMIT = 100  # seconds after which a process counts as one that waits for ever


@pytest.fixture
def start() -> Iterator[Callable[..., Any]]:
    """Starts processes of one job; those that are left are killed."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "OMP_NUM_THREADS": "1"}
    started: list[Any] = []

    def one(*words: str) -> Any:
        command = [sys.executable, SCRIPT, *words]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(warm.Popen(command, env=variables, **streams))
        return started[-1]

    yield one
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("backend", "operations"),
    rest_in("healing", [("ccl", 0), ("gloo", 1), ("ccl", 1), ("gloo", 0), ("gloo", 2), ("gloo", 3)], keep=2),
)
def test_a_group_forms_after_a_process_died_while_it_formed(
    start: Callable[..., Any], backend: str, operations: int
) -> None:
    survivor, first = start("survivor", backend), start("first", backend)
    assert first.wait(LIMIT) == -signal.SIGKILL
    killed = start("killed", backend, str(operations))
    assert killed.wait(LIMIT) == -signal.SIGKILL
    newcomer = start("newcomer", backend)
    output, error = newcomer.communicate(timeout=LIMIT)
    assert output == "attempt 1 sum 3\n", error
    output, error = survivor.communicate(timeout=LIMIT)
    assert output == "formed 3\nattempt 2 sum 3\n", error
