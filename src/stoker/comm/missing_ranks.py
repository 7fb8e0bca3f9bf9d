"""Names the ranks that are missing after a failure between hosts: gloo and oneCCL say that they waited, but not for whom.

Every rank whose operation has failed says so in the group's store; a rank that does not has died or is doing something else.
Nothing is stored or read before a failure.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

__all__ = ["MissingRanks"]

_PATIENCE = 2.0
"""Seconds in which the other ranks, which have waited as long, fail too."""


class MissingRanks:
    """Called with an error message, it returns the message with the missing ranks added."""

    def __init__(self, store: Any, rank: int, names: Sequence[int], hosts: Sequence[str]) -> None:
        """`names`: the ranks' numbers in the whole job; `hosts`: the name of each rank's host."""
        self._store, self._rank, self._names, self._hosts = store, rank, names, hosts
        self._lock = threading.Lock()
        self._finding: str | None = None

    def __call__(self, error: str) -> str:
        with self._lock:
            if self._finding is None:
                self._finding = self._find()
        return f"{error.rstrip()}; {self._finding}"

    def describe(self, ranks: Iterable[int]) -> str:
        """`rank 4, rank 5 on beta`, host by host."""
        by_host: dict[str, list[str]] = {}
        for rank in ranks:
            by_host.setdefault(self._hosts[rank], []).append(f"rank {self._names[rank]}")
        return ", ".join(f"{', '.join(found)} on {host}" for host, found in by_host.items())

    def _find(self) -> str:
        missing = set(range(len(self._names)))
        answered = threading.Event()
        # In a thread, because the store's host may be the one that is down: then the store never answers.
        asking = threading.Thread(target=self._poll, args=(missing, answered), daemon=True)
        asking.start()
        asking.join(_PATIENCE + 1.0)
        if not answered.is_set():
            return f"which ranks are missing is unknown: the job's store, usually with rank {self._names[0]}, does not answer"
        if left := sorted(missing):
            return f"no answer from {self.describe(left)}"
        return (
            "all ranks are alive and reported a failure: check the network, or whether ranks call different collectives"
        )

    def _poll(self, missing: set[int], answered: threading.Event) -> None:
        try:
            # A connection of its own: one that hangs must not keep others from the store.
            store = self._store.clone() if hasattr(self._store, "clone") else self._store
            store.set(f"failed/{self._rank}", "1")
            end = time.monotonic() + _PATIENCE
            while missing and time.monotonic() < end:
                missing -= {rank for rank in list(missing) if store.check([f"failed/{rank}"])}
                answered.set()
                time.sleep(0.05)
        except Exception:  # the failure that led to this is the one to report
            return
