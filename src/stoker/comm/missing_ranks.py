"""Who is missing between hosts, asked once something has failed there: gloo and oneCCL say that they waited, not for whom.

Every rank whose operation has failed says so in the group's store; whoever has not said so is dead or somewhere else. While all
goes well this costs nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

__all__ = ["RollCall"]

_PATIENCE = 2.0
"""Seconds in which the others, who have waited as long, fail too."""


class RollCall:
    """Called with what has gone wrong, it answers with the same words and the names of those who are missing."""

    def __init__(self, store: Any, rank: int, names: Sequence[int], hosts: Sequence[str]) -> None:
        """`names`: the ranks' numbers in the whole job; `hosts`: the name of the host that each is on."""
        self._store, self._rank, self._names, self._hosts = store, rank, names, hosts
        self._lock = threading.Lock()
        self._finding: str | None = None

    def __call__(self, trouble: str) -> str:
        with self._lock:
            if self._finding is None:
                self._finding = self._ask()
        return f"{trouble.rstrip()}; {self._finding}"

    def named(self, ranks: Iterable[int]) -> str:
        """`rank 4, rank 5 on beta`, host by host."""
        by_host: dict[str, list[str]] = {}
        for rank in ranks:
            by_host.setdefault(self._hosts[rank], []).append(f"rank {self._names[rank]}")
        return ", ".join(f"{', '.join(found)} on {host}" for host, found in by_host.items())

    def _ask(self) -> str:
        missing = set(range(len(self._names)))
        heard = threading.Event()
        # The store's host may be the one that is down: then an answer never comes, and nobody shall wait for it.
        asking = threading.Thread(target=self._listen, args=(missing, heard), daemon=True)
        asking.start()
        asking.join(_PATIENCE + 1.0)
        if not heard.is_set():
            return (
                f"who is missing is not known: the store of the job, most likely with rank {self._names[0]}, is silent"
            )
        if left := sorted(missing):
            return f"no word from {self.named(left)}"
        return "all ranks are there and have failed alike, so it is the network, or they do not do the same"

    def _listen(self, missing: set[int], heard: threading.Event) -> None:
        try:
            # A connection of its own: one that hangs must not keep others from the store.
            store = self._store.clone() if hasattr(self._store, "clone") else self._store
            store.set(f"failed/{self._rank}", "1")
            end = time.monotonic() + _PATIENCE
            while missing and time.monotonic() < end:
                missing -= {rank for rank in list(missing) if store.check([f"failed/{rank}"])}
                heard.set()
                time.sleep(0.05)
        except Exception:  # whatever it is, the failure that led here is what has to be told
            return
