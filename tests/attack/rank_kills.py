"""SIGKILL at a random moment to a process of a training run in two ranks: the launcher, a rank, or a process they started.

Everything must end with it: no process and no file in TMPDIR or /dev/shm may remain. The same command must then continue from
the last checkpoint, and produce the same bytes as a run that was not killed.

With `--heal`, a rank is killed once it trains, and the process that takes its place is killed a random time after its start. The
launch must heal, or restart from its checkpoint, and end by itself.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attack import sandbox

__all__ = ["attack_healing", "attack_ranks"]

_LONGEST = 240.0
_PATIENCE = 60.0
"""Seconds for the others to end after a kill. A launch that has lost a rank gives the other one time to exit."""
_HEALS = 120.0
"""Seconds for a launch to heal, or to restart, and to end. Its ranks would wait half an hour for each other."""
_KEEPER = "stoker-keeper"
"""The name of the processes that start those of the ranks (stoker.launch.rank.keeper)."""
_undisturbed: dict[tuple[str, ...], tuple[float, str]] = {}


def attack_ranks(r: random.Random, folder: Path, work: Path, argv: list[str]) -> dict[str, Any]:
    """The failures found, the number of kills, and a log."""
    argv = [*argv, "--ddp_backend", r.choice(("gloo", "ccl"))]
    seconds = _prepare(folder, work, argv)
    shared = set(os.listdir("/dev/shm"))
    moment = (r.uniform(0.1, 1.0) * seconds, r.random())
    child = _start(folder, argv)
    time.sleep(moment[0])
    alive = [child, *_below(child)]
    victim = _kill(alive[int(moment[1] * len(alive))])
    code = _end(child, _PATIENCE)
    story = [f"{victim} after {moment[0]:.1f} s: {code}"]
    return _judge(folder, argv, code, shared, story) | {"kills": 1}


def attack_healing(r: random.Random, folder: Path, work: Path, argv: list[str]) -> dict[str, Any]:
    """The failures found, the number of kills, how many of them were in healing, and a log."""
    argv = [*argv, *_LONGER, "--ddp_backend", r.choice(("gloo", "ccl"))]
    _prepare(folder, work, argv)
    shared = set(os.listdir("/dev/shm"))
    place, moments = r.randrange(2), (r.uniform(0, 1), r.choice((r.uniform(0, 0.3), r.uniform(0, 4))))
    child = _start(folder, argv, "--heal")
    keepers = _wait_for(child, lambda: found if len(found := _keepers_of_training(child)) == 2 else None) or []
    story: list[str] = []
    killed: set[int] = set()
    for moment in moments if keepers else ():
        number = _wait_for(child, lambda: next(iter(set(_processes_of(keepers[place])) - killed), None))
        if number is None:
            break
        time.sleep(moment)
        if number in _below(child):
            story.append(f"{_kill(number)} after {moment:.2f} s")
            killed.add(number)
    code = _end(child, _HEALS)
    story.append(f"the launch: {code}")
    answer = _judge(folder, argv, code, shared, story)
    return answer | {"kills": len(killed), "kills in healing": max(len(killed) - 1, 0)}


_LONGER = ["--max_steps", "200", "--save_steps", "50", "--eval_steps", "100"]
"""Long enough for both kills."""


def _prepare(folder: Path, work: Path, argv: list[str]) -> float:
    """Trains without kills, the first time; then empties the folder. Returns the seconds that it took."""
    from attack.kills import fresh, weights_of

    if tuple(argv) not in _undisturbed:
        fresh(folder, work)
        begin = time.monotonic()
        code = _end(_start(folder, argv), _LONGEST)
        if code != 0:
            raise RuntimeError(f"two ranks without kills ended with {code}: {_error_output(folder)}")
        _undisturbed[tuple(argv)] = time.monotonic() - begin, weights_of(folder)
    fresh(folder, work)
    return _undisturbed[tuple(argv)][0]


def _judge(folder: Path, argv: list[str], code: int | None, shared: set[str], story: list[str]) -> dict[str, Any]:
    """What is wrong after a launch with kills has ended; None: it had to be stopped."""
    from attack.kills import weights_of

    failures = [] if code is not None else ["hang: a launch did not end after a kill"]
    failures += _left(folder, shared, killed=True)
    if code != 0:
        code = _end(_start(folder, argv), _LONGEST)
        story.append(f"to the end: {code}")
    if code != 0:
        failures.append(f"code: the resumed launch ended with {code}")
    elif weights_of(folder) != _undisturbed[tuple(argv)][1]:
        failures.append("different: the model of two ranks differs from that of a run without kills")
    failures += _left(folder, shared, killed=False)
    answer = {"failures": failures, "code": code, "story": story}
    return answer | ({"error": _error_output(folder)} if failures else {})


def _error_output(folder: Path) -> str:
    return (folder / "error").read_text(errors="replace")[-3000:]


def _start(folder: Path, argv: list[str], *options: str) -> int:
    child = os.fork()
    if child == 0:
        _become(folder, argv, options)
    return child


def _kill(number: int) -> str:
    """The name of the process."""
    name = _name(number)
    with contextlib.suppress(OSError):
        os.kill(number, signal.SIGKILL)
    return name


def _end(child: int, seconds: float) -> int | None:
    """The exit code of a launch; None if it has not ended by itself and was killed."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.1)
    for number in [child, *_below(child)]:
        _kill(number)
    os.waitpid(child, 0)
    return None


def _wait_for(child: int, found: Callable[[], Any]) -> Any:
    """What `found` returns once it is not None; None if the launch has ended before."""
    end = time.monotonic() + _PATIENCE
    while time.monotonic() < end and os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if (value := found()) is not None:
            return value
        time.sleep(0.02)
    return None


def _keepers_of_training(child: int) -> list[int]:
    """The keepers of ranks that train: they have a second keeper, from which they replace the rank."""
    keepers = [number for number in _below(child) if _short_name(number) == _KEEPER]
    return [number for number in keepers if any(_short_name(one) == _KEEPER for one in _below(number))]


def _processes_of(keeper: int) -> list[int]:
    """The process of the rank; a moment after a kill, also the one that was killed."""
    below = [keeper, *_below(keeper)]
    keepers = [number for number in below if _short_name(number) == _KEEPER]
    return [number for one in keepers for number in _children(one) if number not in keepers]


def _short_name(number: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{number}/comm").read_text().strip()
    return ""


def _become(folder: Path, argv: list[str], options: tuple[str, ...]) -> None:
    try:
        os.setsid()
        os.chdir(folder / "cwd")
        for number, name in ((1, "output"), (2, "error")):
            os.dup2(os.open(folder / name, os.O_CREAT | os.O_WRONLY | os.O_APPEND), number)
        variables = {**os.environ, "HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp"),
                     "XDG_CACHE_HOME": str(folder.parent / "rates")}  # fmt: skip
        words = [
            sys.executable,
            "-m",
            "stoker",
            "launch",
            "-n",
            "2",
            "--oversubscribe",
            *options,
            "-m",
            "stoker",
            *argv,
        ]
        os.execve(sys.executable, words, variables)
    finally:
        os._exit(99)


def _children(parent: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{parent}/task"):
            found += map(int, Path(f"/proc/{parent}/task/{task}/children").read_text().split())
    return found


def _below(parent: int) -> list[int]:
    """The descendants of the process `parent`."""
    return [number for child in _children(parent) for number in (child, *_below(child))]


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
