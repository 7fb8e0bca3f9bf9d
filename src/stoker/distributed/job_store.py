"""The store in which the ranks of a launch meet, and which of them it believes.

`init_process_group` of a script makes a TCPStore at MASTER_ADDR and MASTER_PORT, to which everybody can write who reaches the
port. In a rank of `stoker launch` it gets one of these instead: on one machine a store in the launch's own directory, between
machines a TCPStore whose values are sealed with the job's secret. A launcher that has neither leaves torch's own.
"""

from __future__ import annotations

import functools
import os
import sys
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.after_import import after_import
from stoker.requires import supported

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["SECRET", "JobStore", "connect", "store_path", "use"]

SECRET = "STOKER_SECRET"
"""The variable with which people give all machines of a job the same secret."""


@dataclass(frozen=True)
class JobStore:
    """Where this process's job has its store. With neither a path nor a secret, it is torch's own."""

    address: str
    port: int
    path: Path | None = None
    """The socket of a `UnixStoreServer`, if all ranks are on one machine."""
    secret: str = field(default="", repr=False)

    def is_at(self, address: str, port: int) -> bool:
        """On one machine the script may have written its address differently."""
        return port == self.port and (self.path is not None or address == self.address)

    def private(self, make: Any, timeout: timedelta) -> dist.Store:
        """A client of this store; `make` makes a TCPStore at its address."""
        from stoker.distributed.sealed_store import SealedStore
        from stoker.distributed.unix_store import UnixStore

        if self.path is not None:
            return UnixStore(self.path, timeout)
        store: dist.Store = make()
        return SealedStore(store, self.secret, str(self.port)) if self.secret else store


_used: list[JobStore] = []
"""The store of this process's job, if its launch has one; at most one."""


def store_path(directory: Path, port: int) -> Path:
    """The socket of the store of one machine's launch. Ranks that are started again get a new one, by their MASTER_PORT."""
    return directory / f"store.{port}"


def use(job: JobStore) -> None:
    """From now on this process finds the other ranks in this store. To be called before torch.distributed is used."""
    _used[:] = [job]
    after_import("torch.distributed.rendezvous", functools.partial(_wrap, job))


def connect(timeout: timedelta) -> dist.Store:
    """A further client of the store of this process's job, which another process serves."""
    import torch.distributed as dist

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    make = functools.partial(dist.TCPStore, address, port, is_master=False, wait_for_workers=False, timeout=timeout)
    if _used and _used[0].is_at(address, port):
        return _used[0].private(make, timeout)
    return make()


def _wrap(job: JobStore) -> None:
    if not supported("job store"):
        return
    rendezvous: Any = sys.modules["torch.distributed.rendezvous"]  # torch.distributed has a function of that name
    create = rendezvous._create_c10d_store

    @functools.wraps(create)
    def create_store(
        hostname: str, port: int, rank: int, world_size: int, timeout: timedelta, *args: Any, **named: Any
    ) -> Any:
        make = functools.partial(create, hostname, port, rank, world_size, timeout, *args, **named)
        return job.private(make, timeout) if job.is_at(hostname, port) else make()

    rendezvous._create_c10d_store = create_store
