"""Starts `stoker watch` for the run of this process, as `stoker train --live` does.

A process of its own, which only reads the log: no reader and no failure of the server can slow or stop the training. It ends
with this process, however that ends, after open pages have received the last state.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

from stoker.errors import UserError

__all__ = ["start_live"]

_PATIENCE = 60.0
"""Seconds for Python to start on a busy machine."""


def start_live(folder: Path, host: str, port: int) -> str:
    """Returns the line with the address of the page; UserError if it cannot be served."""
    command = [sys.executable, "-m", "stoker", "watch", str(folder.absolute()), "--process", str(os.getpid())]
    command += ["--host", host, "--port", str(port)]
    # A session of its own: Ctrl-C in the terminal lets training save a checkpoint, which the page should still show.
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stderr is not None
    with process.stdout as output, process.stderr as errors:
        line = _first_line(output.fileno())
        if not line:
            if process.poll() is None and not _ends_soon(process):
                os.kill(process.pid, signal.SIGKILL)
                raise UserError(f"--live: the page was not served within {_PATIENCE:.0f} s; leave the option out")
            reason = errors.read(4000).decode(errors="replace").strip().removeprefix("stoker: ").split("\n")[-1]
            raise UserError(f"--live: {reason.replace('--port', '--live_port').replace('--host', '--live_host')}")
    _CHILDREN.append(process)
    return line


_CHILDREN: list[subprocess.Popen[bytes]] = []
"""Kept, because Python warns of a running process that nobody refers to."""


def _first_line(descriptor: int) -> str:
    """What the process prints until the end of a line; empty if it ends or takes too long."""
    data, deadline = b"", time.monotonic() + _PATIENCE
    while b"\n" not in data:
        if not select.select([descriptor], [], [], max(deadline - time.monotonic(), 0.0))[0]:
            return ""
        piece = os.read(descriptor, 4096)
        if not piece:
            return ""
        data += piece
    return data.decode(errors="replace").partition("\n")[0]


def _ends_soon(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(5.0)
    except subprocess.TimeoutExpired:
        return False
    return True
