"""A rank that was killed, and the process that takes its place: what the two sides tell each other before torch is imported.

Under `stoker launch --heal` every rank has a keeper (`stoker.launch.rank.keeper`), which starts the rank's process. A rank that
can be replaced leaves a mark in the launch's directory; if it is killed then, its keeper starts another process for it. That
one runs the script alone, without communicating, until its Trainer joins the others (`stoker.hf.healing`).

A machine that is lost takes its keepers along. If `stoker launch` is started there again, or on another machine, its ranks join
in the same way, and the agents of the other machines tell their ranks that a machine was lost (`lost_machines`).
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from pathlib import Path

__all__ = [
    "HEAL",
    "LostRank",
    "count_replaceable",
    "healing_directory",
    "is_joining",
    "is_replaceable",
    "joined",
    "lost_machines",
    "replaceable",
    "tell_lost_machines",
]

HEAL = "STOKER_HEAL"
"""The variable with the directory of the marks. It is set in ranks that have a keeper."""
_REPLACES = "STOKER_REPLACES"
"""What became of the process before this one; set until this process has joined the others."""
_WITH_MACHINE = 0
"""In place of a signal: the process was lost with its machine."""


@dataclass(frozen=True)
class LostRank:
    signal: int
    """The signal that ended it; 0 if it was lost with its machine."""
    at: float
    """When its keeper noticed, by time.monotonic() of its machine."""

    @classmethod
    def with_machine(cls) -> LostRank:
        """It was lost with its machine, and this is the machine that takes that one's place."""
        return cls(_WITH_MACHINE, time.monotonic())

    @property
    def seconds_ago(self) -> float:
        return time.monotonic() - self.at

    def tell_replacement(self) -> None:
        """Called in the new process, or in the one that is about to start it, before anything else."""
        os.environ[_REPLACES] = self.to_json()

    def to_json(self) -> str:
        return json.dumps(astuple(self))

    @classmethod
    def from_json(cls, text: str) -> LostRank:
        return cls(*json.loads(text))

    @classmethod
    def replaced_by_this_process(cls) -> LostRank | None:
        """The process whose place this one takes; None if there is none, or if this one has joined the others."""
        text = os.environ.get(_REPLACES)
        return cls.from_json(text) if text else None


def is_joining() -> bool:
    """Whether this process replaces a lost rank and has not joined the others yet: its collectives reach nobody."""
    return _REPLACES in os.environ


def joined() -> None:
    """This process communicates with the others from now on."""
    os.environ.pop(_REPLACES, None)


def healing_directory() -> Path | None:
    """Where a rank says that it can be replaced; None if it has no keeper."""
    text = os.environ.get(HEAL)
    return Path(text) if text else None


def _mark(directory: Path, rank: int) -> Path:
    return directory / f"replaceable.{rank}"


@contextlib.contextmanager
def replaceable(directory: Path, rank: int) -> Iterator[None]:
    """While this context lasts, the keeper of `rank` replaces this process if it is killed."""
    mark = _mark(directory, rank)
    mark.write_text(str(os.getpid()))
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            mark.unlink()


def count_replaceable(directory: Path) -> int:
    """How many ranks of this machine are in `replaceable`."""
    return len(list(directory.glob("replaceable.*")))


def tell_lost_machines(directory: Path, count: int) -> None:
    """Tells the ranks of this machine how many machines the job has lost, so that they do not wait for those."""
    part = directory / "lost_machines.part"
    part.write_text(str(count))
    part.replace(directory / "lost_machines")


def lost_machines(directory: Path) -> int:
    """How many machines the job has lost since these ranks were started, as far as this machine knows."""
    try:
        return int((directory / "lost_machines").read_text())
    except OSError:
        return 0


def is_replaceable(directory: Path, rank: int, pid: int) -> bool:
    """Whether the process `pid` was killed while it was in `replaceable`."""
    try:
        return _mark(directory, rank).read_text() == str(pid)
    except OSError:
        return False
