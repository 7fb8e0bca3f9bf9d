"""One machine's part of a launch with torchrun's agent, and the socket on which machine 0 accepts the others."""

from __future__ import annotations

import errno
import os
import socket
from dataclasses import dataclass

from stoker.errors import UserError
from stoker.machine import network

__all__ = ["Job", "listen", "silence"]

_SILENCE = 15.0


@dataclass(frozen=True, kw_only=True)
class Job:
    """One machine's part of a launch."""

    local_size: int
    machines: int = 1
    """The largest number of machines."""
    least: int = 1
    """The smallest number; fewer than `machines` if the job continues without one."""
    machine_rank: int = 0
    """-1: any but the first; machine 0 assigns the number."""
    address: str = "127.0.0.1"
    port: int | None = None
    max_restarts: int = 0
    wait: float = 600.0
    """Seconds to wait for the other machines."""
    grace: int = 10
    """Seconds between SIGTERM and SIGKILL."""
    silence: float = _SILENCE
    """Seconds without a heartbeat after which a machine counts as dead."""

    waits_for_lost: bool = False
    """Whether a job of a fixed number of machines waits for one that was lost, instead of failing."""

    @property
    def elastic(self) -> bool:
        return self.least < self.machines


def silence() -> float:
    """The value of STOKER_LAUNCH_SILENCE."""
    text = os.environ.get("STOKER_LAUNCH_SILENCE", str(_SILENCE))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 1.0 <= seconds <= 3600.0:
        raise UserError(f"STOKER_LAUNCH_SILENCE={text}: it must be a number of seconds from 1 to 3600")
    return seconds


def listen(job: Job) -> socket.socket:
    """A listening socket on this address only; torch's store would listen on all interfaces."""
    addresses = network.resolve(job.address)
    if not addresses and job.address.split(".")[0] == socket.gethostname().split(".")[0]:
        addresses = (network.own_address(),)  # a pod starts before its own name is known to the cluster's DNS
    if not addresses:
        raise UserError(f"--main_process_ip {job.address} is not known to this machine; give an address of it")
    listener = socket.socket(socket.AF_INET6 if ":" in addresses[0] else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((addresses[0], job.port or 0))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise UserError(
                f"port {job.port} on {job.address} is in use by another program; choose another with --main_process_port"
                + (", the same on all machines" if job.machines > 1 else "")
            ) from None
        if error.errno == errno.EADDRNOTAVAIL:
            raise UserError(
                f"--main_process_ip {job.address} is not an address of this machine, which is machine_rank 0; its own is "
                f"{network.own_address()}"
            ) from None
        raise UserError(f"cannot listen on {job.address}, port {job.port}: {error.strerror}") from None
    return listener
