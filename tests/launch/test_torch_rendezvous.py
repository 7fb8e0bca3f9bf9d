"""Why `stoker launch` has a rendezvous of its own: what torch's dynamic rendezvous over c10d cannot do.

Each test runs torch's own handler in a situation that Stoker's handles and asserts how torch's fails. A test that no longer
passes with a new torch means that this reason has gone: see the head of stoker/launch/launchers/rendezvous.py.
"""

from __future__ import annotations

import json
import pickle
import signal
import socket
import subprocess
import sys
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from live import SCRIPTS

from rig import Rig

MACHINE = [sys.executable, str(SCRIPTS / "torch_rendezvous.py")]


@pytest.fixture
def endpoint() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


def start(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen([*MACHINE, *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def line(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    found: dict[str, Any] = json.loads(process.stdout.readline())
    return found


def test_torch_does_not_end_the_round_when_a_machine_dies(endpoint: str, started: list[subprocess.Popen[str]]) -> None:
    """The survivor drops the dead machine from its list, but its agent restarts ranks only for machines that wait to join."""
    started += [start(endpoint, "--serve"), start(endpoint)]
    assert [line(process) for process in started] == [{"machines": 2}] * 2
    started[1].kill()
    while line(started[0])["members"] == 2:
        pass
    assert [line(started[0]) for _ in range(4)] == [{"members": 1, "waiting": 0}] * 4


@pytest.mark.root
@pytest.mark.netns
def test_torch_hangs_when_the_machine_with_the_store_loses_power() -> None:
    """Neither the read time-out of 2 s nor SIGTERM ends the call: the main thread waits inside the store's client."""
    with Rig(2) as rig:
        words = [*MACHINE, f"{rig.address('alpha')}:29500", "--keep_alive", "600"]
        first, second = rig.start("alpha", [*words, "--serve"]), rig.start("beta", words)
        assert [line(first), line(second)] == [{"machines": 2}] * 2
        rig.kill("alpha")
        first.communicate()
        with pytest.raises(subprocess.TimeoutExpired):
            second.wait(timeout=6)
        second.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            second.wait(timeout=3)
        second.kill()
        second.communicate()


@pytest.mark.parametrize(("clock", "agreed"), [("0", True), ("-60", False)])
def test_torch_needs_synchronized_clocks(
    clock: str, agreed: bool, endpoint: str, started: list[subprocess.Popen[str]]
) -> None:
    """Heartbeats are times of day by the sender's clock. A machine whose clock is a minute behind counts as dead to the other,
    which then starts alone although two machines are the minimum."""
    started += [start(endpoint, "--serve"), start(endpoint, "--clock", clock)]
    assert ([line(process) for process in started] == [{"machines": 2}] * 2) is agreed


class Touch:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, tuple[str, str]]:
        return open, (str(self._path), "x")


def test_torch_unpickles_what_it_finds_in_the_store(tmp_path: Path) -> None:
    """Whoever can reach the store, which asks for no password, can run code on every machine of the job."""
    from torch.distributed import TCPStore
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

    store = TCPStore("127.0.0.1", 0, is_master=True)
    handler = DynamicRendezvousHandler.from_backend("run", store, C10dRendezvousBackend(store, "run"), 1, 2)
    TCPStore("127.0.0.1", store.port).set("torch.rendezvous.run", b64encode(pickle.dumps(Touch(tmp_path / "made"))))
    with pytest.raises(AttributeError):
        handler.is_closed()
    assert (tmp_path / "made").exists()
