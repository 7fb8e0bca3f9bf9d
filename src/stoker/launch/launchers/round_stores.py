"""The stores of a launch, one for each round of ranks: a socket in its directory on one machine, a port between machines."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from torch.distributed import TCPStore

from stoker.distributed.job_store import JobStore, store_path
from stoker.distributed.unix_store import UnixStoreServer
from stoker.errors import UserError
from stoker.launch.launchers.elastic_job import Job, listen
from stoker.machine.network import free_port

__all__ = ["LocalStores", "NetworkStores", "Stores"]


class Stores(Protocol):
    served_by_agent: bool
    """Whether torch's ranks find a TCPStore at their MASTER_PORT."""

    def serve(self, port: int) -> Any:
        """Serves the store of the first round; returns a client."""

    def open_round(self) -> tuple[int, Any]:
        """Serves another store; returns its port, by which it is found, and a client."""

    def connect(self, port: int) -> Any:
        """A client of the store that the first machine serves at a port."""


@dataclass(frozen=True)
class LocalStores:
    """Nobody but the user can enter the directory. `port` is only a name: nobody listens there."""

    directory: Path
    timeout: timedelta
    served_by_agent = False

    def serve(self, port: int) -> Any:
        UnixStoreServer(store_path(self.directory, port))
        return self.connect(port)

    def open_round(self) -> tuple[int, Any]:
        port = free_port()
        return port, self.serve(port)

    def connect(self, port: int) -> Any:
        return JobStore("127.0.0.1", port, store_path(self.directory, port)).private(None, self.timeout)


@dataclass(frozen=True)
class NetworkStores:
    """TCPStores on the first machine, whose values are sealed with the job's secret."""

    job: Job
    listener: socket.socket | None
    timeout: timedelta
    secret: str
    served_by_agent = True

    def serve(self, port: int) -> Any:
        assert self.listener is not None  # on the first machine
        return self._client(port, self.listener)

    def open_round(self) -> tuple[int, Any]:
        with listen(replace(self.job, port=None)) as listener:
            port: int = listener.getsockname()[1]
            return port, self._client(port, listener)

    def connect(self, port: int) -> Any:
        return self._client(port, None)

    def _client(self, port: int, listener: socket.socket | None) -> Any:
        """With a listener, also the server."""
        address = self.job.address
        server: dict[str, Any] = {"master_listen_fd": os.dup(listener.fileno())} if listener is not None else {}

        def make() -> Any:
            return TCPStore(address, port, None, bool(server), self.timeout, False, multi_tenant=False, **server)

        try:
            return JobStore(address, port, secret=self.secret).private(make, self.timeout)
        except Exception as error:
            reason = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
            raise UserError(
                f"machine {self.job.machine_rank} cannot reach the first machine at {address}, port {port}: is "
                f"`stoker launch` running there with --machine_rank 0, and is the port open? ({reason})"
            ) from None
