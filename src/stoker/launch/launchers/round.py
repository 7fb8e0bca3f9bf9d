"""What the machines of a launch write to its store: a report of each, twice a second, and the round that the first publishes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from typing import TypeVar

from stoker.launch.rank.failure import Failure

__all__ = [
    "BROKEN", "FINISHED", "JOINED", "LEFT", "RUNNING", "VACANT", "WAITING", "Report", "Round", "decode", "encode",
    "version_difference",
]  # fmt: skip

WAITING, RUNNING, FINISHED, LEFT = "waiting", "running", "finished", "left"
"""What a machine does: it waits for the next round, runs ranks, or has ended, with or without success."""
JOINED, BROKEN = "joined", "broken"
"""Why a round ends: a machine wants to join, or the ranks of one have failed or died with it."""
VACANT = ""
"""In place of a member: the machine was lost, and the ranks of the others wait for one that takes its place."""


@dataclass(frozen=True)
class Report:
    """What a machine writes to the store. The first five fields are the same in every version of Stoker."""

    token: str
    """Random, so that a launch is not taken for an earlier one of the same machine."""
    host: str
    python: str
    torch: str | None
    stoker: str | None
    machine: int = -1
    status: str = WAITING
    round: int = 0
    """The last round that it took part in."""
    count: int = 0
    """Grows with each report."""
    ranks: int = 0
    """How many ranks it runs."""
    can_wait: bool = False
    """Whether all its ranks can go on in memory with processes that take the place of others."""
    losses: int = 0
    """Of how many lost machines it has told its ranks."""
    failure: Failure | None = None
    """What ends the job on all machines."""

    def __str__(self) -> str:
        return f"machine {self.machine} ({self.host})"


@dataclass(frozen=True)
class Round:
    """What the first machine publishes."""

    number: int = 0
    members: Sequence[str] = ()
    """The tokens of the machines that take part, in the order of their ranks; VACANT for one that was lost."""
    port: int = 0
    """Where the ranks find their store on the first machine."""
    ending: str = ""
    """Why all ranks have to end; empty while they run."""
    finished: bool = False
    losses: int = 0
    """How many machines were lost in this round, while the ranks of the others waited."""
    replacements: Sequence[str] = ()
    """The machines that have taken the place of lost ones in this round."""
    failure: Failure | None = None


_Record = TypeVar("_Record", Report, Round)


def encode(record: Report | Round) -> str:
    return json.dumps(astuple(record))


def decode(kind: type[_Record], text: bytes) -> _Record:
    values = json.loads(text)
    if len(values) != len(fields(kind)):  # a report from another version of Stoker
        return kind(*values[:5])
    values[-1] = Failure(*values[-1]) if values[-1] else None
    return kind(*values)


def version_difference(other: Report, own: Report) -> str:
    """What differs between another machine and this one; empty if nothing does."""
    for name in ("python", "torch", "stoker"):
        theirs, ours = getattr(other, name), getattr(own, name)
        if theirs != ours:
            return f"{other.host} has {name} {theirs}, {own.host} has {ours}; install the same version on both"
    return ""
