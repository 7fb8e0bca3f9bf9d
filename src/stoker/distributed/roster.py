"""Which processes continue after a rank was lost: they agree on a list, the roster, through the job's store.

Everyone that wants to continue writes an entry: the processes that have lost a rank, and the process that takes its place. When
each rank has one, the first to see it publishes the roster, and all in it form a new process group. If that fails, because
another rank was lost meanwhile, everyone writes an entry for the next roster. Entries are JSON; nothing is unpickled from the
store, which has no password.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from stoker.process_life import facts_of, is_alive

__all__ = ["Entry", "Roster", "RosterFailed", "RosterStore"]

_POLL = 0.02


class RosterFailed(Exception):
    """Why the job cannot continue without a restart."""


@dataclass(frozen=True)
class Entry:
    """What a process says about itself."""

    token: str
    """Random, so that a process is not taken for the one whose place it takes."""
    rank: int
    after: int
    """The number of the last roster that this process knows; the next one is formed of entries that know the same."""
    position: tuple[int, int] | None = None
    """How far the training is that this process has in memory; None if it has nothing, as one that has just started."""
    signal: int | None = None
    """In a process that replaces another: the signal that ended that one."""
    facts: str = ""
    """A digest of model, data and settings, which must be the same on all ranks."""
    process: Mapping[str, Any] = field(default_factory=dict)
    """By which other processes of its machine find out that it has ended (`stoker.process_life`)."""


@dataclass(frozen=True)
class Roster:
    number: int
    entries: Sequence[Entry]
    """By rank."""

    @property
    def lost(self) -> list[Entry]:
        """The entries of processes that have taken the place of others."""
        return [entry for entry in self.entries if entry.signal is not None]

    @property
    def donor(self) -> Entry:
        """The process that the others take the training from: the lowest rank of those that are furthest."""
        holders = [entry for entry in self.entries if entry.position is not None]
        if not holders:
            raise RosterFailed("no process is left that has the training in memory")
        return max(holders, key=lambda entry: (entry.position or (0, 0), -entry.rank))


class RosterStore:
    """One process's side of the agreement. `store` is any store of torch.distributed that all ranks share."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._token = secrets.token_hex(8)
        self._known = 0
        """The number of the last roster that this process has seen."""

    def agree(
        self,
        position: tuple[int, int] | None,
        facts: str,
        signal: int | None,
        *,
        seconds: float,
        check: Callable[[], None],
    ) -> Roster:
        """The next roster that this process is in. Calls `check` while it waits, which may raise.

        Raises RosterFailed if a rank does not come within `seconds`.
        """
        deadline = time.monotonic() + seconds
        announced = -1
        while time.monotonic() < deadline:
            check()
            if (roster := self._published(self._known + 1)) is not None:
                self._known = roster.number
                if roster.entries[self._rank].token == self._token:
                    return roster
                continue  # it was formed with the process whose place this one takes
            if announced != self._known:
                announced = self._known
                process = facts_of(os.getpid())
                own = Entry(self._token, self._rank, announced, position, signal, facts, process)
                self._store.set(f"entry/{self._rank}", json.dumps(asdict(own)))
            if not self._publish(self._known + 1):
                time.sleep(_POLL)
        missing = [rank for rank, entry in enumerate(self._entries()) if entry is None or entry.after != self._known]
        raise RosterFailed(f"rank {', '.join(map(str, missing))} did not come back within {seconds:.0f} s")

    def is_current(self, roster: Roster) -> bool:
        """Whether the processes of the roster can still form its group.

        They cannot if one of them has ended, was replaced, or has given up and waits for the next roster. That a process on
        another machine has ended is known only when it was replaced.
        """
        if any(is_alive(entry.process) is False for entry in roster.entries):
            return False
        return all(
            now is not None and (now.token, now.after) == (then.token, then.after)
            for now, then in zip(self._entries(), roster.entries, strict=True)
        )

    def _entries(self) -> list[Entry | None]:
        keys = [f"entry/{rank}" for rank in range(self._size)]
        return [_entry(json.loads(self._store.get(key))) if self._store.check([key]) else None for key in keys]

    def _published(self, number: int) -> Roster | None:
        key = f"roster/{number}"
        if not self._store.check([key]):
            return None
        return Roster(number, [_entry(one) for one in json.loads(self._store.get(key))])

    def _publish(self, number: int) -> bool:
        """Publishes a roster if all ranks have an entry for it. Of two processes that do so at once, the first decides."""
        entries = [entry for entry in self._entries() if entry is not None and entry.after == number - 1]
        if len(entries) < self._size:
            return False
        self._store.compare_set(f"roster/{number}", "", json.dumps([asdict(entry) for entry in entries]))
        return True


def _entry(values: dict[str, Any]) -> Entry:
    position = values["position"]
    return Entry(**{**values, "position": None if position is None else tuple(position)})
