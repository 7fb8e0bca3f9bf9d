"""The default process group of a job that heals: it can be left after a rank was lost, and formed again with the process that
takes its place.

The ranks meet in the store of torchrun's agent, which outlives all of them. A process that replaces a lost rank begins in a
group of torch's backend "fake", whose collectives return at once: the script may call barriers before training, in which the
others took part long ago.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from stoker.distributed import job_store
from stoker.distributed.forming import NotFormed, Watch, WatchedStore, open_sockets, opened_since, shut_down
from stoker.distributed.lost_rank import healing_directory, is_joining, lost_machines
from stoker.distributed.roster import Roster, RosterStore
from stoker.requires import require

__all__ = ["HealingGroup", "NotFormed", "is_lost_connection"]

_FORMING = timedelta(seconds=60)
"""How long a process waits in the store for another one, once the first group was formed."""
_POLL = 0.5
"""Seconds between looks whether a machine was lost."""


class HealingGroup:
    """The default group of this process, and the store through which it is formed again."""

    current: HealingGroup | None = None
    """torch.distributed has one default group per process as well."""

    def __init__(self, backend: str, rank: int, size: int, timeout: timedelta) -> None:
        require("healing")
        self.rank, self.size = rank, size
        self._backend, self._timeout = backend, timeout
        client = job_store.connect(_FORMING)
        self._store = dist.PrefixStore("stoker/heal", client)
        self.roster_store = RosterStore(self._store, rank, size)
        self._sockets: dict[int, str] = {}
        self._sockets_before: dict[int, str] | None = None
        """While a group is formed: the sockets that there were before."""
        self._known_losses = 0
        """Of machines, when the group was formed."""
        self._watched: dist.Store | None = None
        """The store of the group, which torch uses, but does not keep alive."""
        HealingGroup.current = self
        if int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1:  # set by torchrun's agent: the number of machines
            threading.Thread(target=self._leave_lost_machines, daemon=True).start()
        if is_joining():
            import torch.testing._internal.distributed.fake_pg  # noqa: F401  # registers the backend

            dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=size)
        else:
            # The others may take minutes to come here, but the store waits as long as the first group always does.
            client.set_timeout(timeout)
            self._form(0)
            client.set_timeout(_FORMING)

    def leave(self) -> None:
        """Leaves the group after an operation has failed, so that the operations of other ranks in it fail, too."""
        # gloo has no abort: a rank that does not exchange data with the lost one would wait until its timeout.
        shut_down(self._sockets)
        if not dist.is_initialized():
            # init_process_group counts its calls, also one that fails, and the number is part of the names of its keys in the
            # store. Others, which were not in that call, would wait for keys of other names.
            torch.distributed.distributed_c10d._world.group_count = 0
            return
        world: Any = dist.group.WORLD
        if dist.get_backend() != "fake":
            world.abort()
        dist.destroy_process_group()

    def form(self, roster: Roster, check: Callable[[], None]) -> None:
        """Forms the group of a roster. Raises NotFormed if one of its processes is lost meanwhile."""
        store = dist.PrefixStore(f"here/{roster.number}", self._store)
        store.set(str(self.rank), "")
        keys = [str(rank) for rank in range(self.size)]
        watch = Watch(lambda: self.roster_store.is_current(roster), self.size)
        try:
            with watch:
                while not store.check(keys):
                    check()
                    watch.check()
                    time.sleep(0.02)
                self._form(roster.number, watch)
        except Exception as error:
            if watch.over:
                raise NotFormed from error
            raise
        watch.check()  # a part of what was formed may have been ended already

    def _leave_lost_machines(self) -> None:
        """Ends the connections of the group when a machine was lost: one without power does not close its own."""
        directory = healing_directory()
        while directory is not None and directory.exists():
            time.sleep(_POLL)
            if lost_machines(directory) > self._known_losses:
                before = self._sockets_before
                shut_down(self._sockets if before is None else opened_since(before))

    def _form(self, number: int, watch: Watch | None = None) -> None:
        directory = healing_directory()
        self._known_losses = lost_machines(directory) if directory is not None else 0
        self._sockets_before = before = open_sockets()
        store: dist.Store = dist.PrefixStore(f"group/{number}", self._store)
        if watch is not None:
            store = self._watched = WatchedStore(store, watch)
        try:
            dist.init_process_group(
                self._backend, store=store, rank=self.rank, world_size=self.size, timeout=self._timeout
            )
            self._sockets = opened_since(before)
        finally:
            self._sockets_before = None


def is_lost_connection(error: BaseException | None) -> bool:
    """Whether an error comes from an operation with another rank, which may have been lost."""
    while error is not None:
        if isinstance(error, dist.DistError):
            return True
        if isinstance(error, RuntimeError) and ("gloo" in str(error) or str(error).startswith("ccl:")):
            return True
        error = error.__cause__ or error.__context__
    return False
