"""SIGKILL at a random moment to a process of a training run in two ranks: the launcher, a rank, or a process they started.

Everything must end with it: no process and no file in TMPDIR or /dev/shm may remain. The same command must then continue from
the last checkpoint, and produce the same bytes as a run that was not killed.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

from attack import sandbox

__all__ = ["attack_ranks"]

_LONGEST = 240.0
_PATIENCE = 60.0
"""Seconds for the others to end after a kill. A launch that has lost a rank gives the other one time to exit."""
_undisturbed: dict[str, tuple[float, str]] = {}


def attack_ranks(r: random.Random, folder: Path, work: Path, argv: list[str]) -> dict[str, Any]:
    """The failures found, the number of kills, and a log."""
    from attack.kills import fresh, weights_of

    backend = r.choice(("gloo", "ccl"))
    argv = [*argv, "--ddp_backend", backend]
    if backend not in _undisturbed:
        fresh(folder, work)
        begin = time.monotonic()
        code = _run(folder, argv, None)[0]
        if code != 0:
            raise RuntimeError(f"two ranks without kills ended with {code}: {_error_output(folder)}")
        _undisturbed[backend] = time.monotonic() - begin, weights_of(folder)
    seconds, weights = _undisturbed[backend]
    fresh(folder, work)
    shared = set(os.listdir("/dev/shm"))
    moment = (r.uniform(0.1, 1.0) * seconds, r.random())
    code, victim = _run(folder, argv, moment)
    story, failures = [f"{victim} after {moment[0]:.1f} s: {code}"], []
    if code is None:
        failures.append("hang: a launch did not end after a kill")
    failures += _left(folder, shared, killed=True)
    if code != 0:
        code = _run(folder, argv, None)[0]
        story.append(f"to the end: {code}")
    if code != 0:
        failures.append(f"code: the resumed launch ended with {code}")
    elif weights_of(folder) != weights:
        failures.append("different: the model of two ranks differs from that of a run without kills")
    failures += _left(folder, shared, killed=False)
    answer = {"failures": failures, "kills": int(victim is not None), "code": code, "story": story}
    return answer | ({"error": _error_output(folder)} if failures else {})


def _error_output(folder: Path) -> str:
    return (folder / "error").read_text(errors="replace")[-3000:]


def _run(folder: Path, argv: list[str], moment: tuple[float, float] | None) -> tuple[int | None, str | None]:
    """The exit code of the launch (None if it had to be stopped), and the process that was killed."""
    child = os.fork()
    if child == 0:
        _become(folder, argv)
    victim = None
    if moment is not None:
        time.sleep(moment[0])
        alive = [child, *_below(child)]
        number = alive[int(moment[1] * len(alive))]
        victim = _name(number)
        with contextlib.suppress(OSError):
            os.kill(number, signal.SIGKILL)
    end = time.monotonic() + (_LONGEST if moment is None else _PATIENCE)
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status), victim
        time.sleep(0.1)
    for number in [child, *_below(child)]:
        with contextlib.suppress(OSError):
            os.kill(number, signal.SIGKILL)
    os.waitpid(child, 0)
    return None, victim


def _become(folder: Path, argv: list[str]) -> None:
    try:
        os.setsid()
        os.chdir(folder / "cwd")
        for number, name in ((1, "output"), (2, "error")):
            os.dup2(os.open(folder / name, os.O_CREAT | os.O_WRONLY | os.O_APPEND), number)
        variables = {**os.environ, "HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp"),
                     "XDG_CACHE_HOME": str(folder.parent / "rates")}  # fmt: skip
        words = [sys.executable, "-m", "stoker", "launch", "-n", "2", "--oversubscribe", "-m", "stoker", *argv]
        os.execve(sys.executable, words, variables)
    finally:
        os._exit(99)


def _below(parent: int) -> list[int]:
    """The descendants of the process `parent`."""
    found = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{parent}/task"):
            for number in Path(f"/proc/{parent}/task/{task}/children").read_text().split():
                found += [int(number), *_below(int(number))]
    return found


def _name(number: int) -> str:
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{number}/cmdline").read_bytes().split(b"\0")
        return b" ".join(words[1:5]).decode(errors="replace")[:60] or "a process that was ending"
    return "a process that had ended"


def _left(folder: Path, shared: set[str], *, killed: bool) -> list[str]:
    """Waits for signalled processes to end; returns what remains. The next launch removes what `kill -9` leaves in TMPDIR."""
    end = time.monotonic() + _PATIENCE
    while sandbox.children() and time.monotonic() < end:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, os.WNOHANG)
        time.sleep(0.1)
    found = [f"leftover: process {name}" for _, name in sandbox.children()]
    for number, _ in sandbox.children():
        with contextlib.suppress(OSError):
            os.kill(number, signal.SIGKILL)
            os.waitpid(number, 0)
    found += [f"leftover: TMPDIR/{name}" for name in os.listdir(folder / "tmp") if not killed]
    for name in set(os.listdir("/dev/shm")) - shared:
        found.append(f"leftover: /dev/shm/{name}")
        os.unlink(f"/dev/shm/{name}")
    return found
