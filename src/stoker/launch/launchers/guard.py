"""One ssh connection to each other host of an mpirun: it notices a host that dies, and ends processes left over there.

`Lifelines` runs beside mpirun, which does not notice a dead host. The other end, `python -m stoker.launch.launchers.guard JOB`,
ends the job's processes on its host when the launch has ended or its heartbeat stops.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from stoker.launch.launchers.remote_hosts import ssh_command
from stoker.launch.rank import leftovers
from stoker.machine import network

__all__ = ["Lifelines", "main"]

_BEAT = 2.0
"""Seconds between two heartbeats, single bytes that the launch sends to the guards."""
_SILENCE = 20.0
"""Seconds without a heartbeat after which the launch counts as dead."""
_GRACE = 5.0
"""Seconds in which the job's processes may end by themselves."""


class Lifelines:
    """One ssh connection per other host; `lost` is called with the name of a host whose connection breaks."""

    def __init__(
        self, hosts: Sequence[str], job: str, lost: Callable[[str], None], environment: Mapping[str, str]
    ) -> None:
        self._lost = lost
        self._closing = threading.Event()
        self._lines: dict[str, subprocess.Popen[bytes]] = {}
        alive = ["-o", "ServerAliveInterval=3", "-o", "ServerAliveCountMax=3"]
        path = environment.get("PYTHONPATH")
        program = [
            *(["env", f"PYTHONPATH={path}"] if path else []),
            sys.executable,
            "-m",
            "stoker.launch.launchers.guard",
            job,
        ]
        # The shell confirms the connection before Python has started: a host may die in that second too.
        program = ["sh", "-c", 'echo connected; exec "$@"', "sh", *program]
        for host in hosts:
            if network.is_local(host):
                continue
            command = ssh_command(host, program)
            command[1:1] = alive
            with contextlib.suppress(OSError):
                self._lines[host] = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    env=dict(environment),
                    start_new_session=True,  # Ctrl-C is for the launch alone
                )
        for host, line in self._lines.items():
            threading.Thread(target=self._hold, args=(host, line), daemon=True).start()

    def _hold(self, host: str, line: subprocess.Popen[bytes]) -> None:
        assert line.stdin is not None
        assert line.stdout is not None
        if not line.stdout.readline():
            return  # never connected; mpirun has its own connection to that host, and reports what is wrong with it
        while not self._closing.wait(_BEAT):
            try:
                line.stdin.write(b".")
                line.stdin.flush()
            except OSError:
                pass
            if line.poll() is not None:
                if not self._closing.is_set():
                    self._lost(host)
                return

    def close(self) -> None:
        """Lets the guards end what is left, and waits for them."""
        self._closing.set()
        for line in self._lines.values():
            with contextlib.suppress(OSError):
                assert line.stdin is not None
                line.stdin.close()
        for line in self._lines.values():
            try:
                line.wait(timeout=_GRACE + 4)
            except subprocess.TimeoutExpired:
                line.kill()
                line.wait()


def main(arguments: Sequence[str]) -> int:
    """The remote end: waits until the heartbeat stops, then cleans up."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the broken connection is what it waits for
    last = time.monotonic()
    while time.monotonic() - last < _SILENCE:
        if select.select([0], [], [], 1.0)[0]:
            if not os.read(0, 4096):
                break
            last = time.monotonic()
    clean_up(arguments[0])
    return 0


def clean_up(job: str, grace: float = _GRACE) -> list[int]:
    """Ends the remaining processes of a job on this machine; returns them."""
    limit = time.monotonic() + grace
    while leftovers.processes_of(job) and time.monotonic() < limit:
        time.sleep(0.1)
    return leftovers.end(job)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
