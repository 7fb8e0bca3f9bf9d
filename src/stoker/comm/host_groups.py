"""Which ranks are on the same host, and by which address the other hosts reach this one.

Network interfaces are never chosen by name: names differ between hosts, and libraries that compare them hang.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
from pathlib import Path

import torch.distributed as dist

__all__ = ["address_towards", "exchange", "group_by_host", "host_identity", "own_address"]


def host_identity() -> str:
    """Equal for processes that can share memory. STOKER_CCL_HOST overrides it.

    The boot id distinguishes machines with the same name, the network namespace distinguishes containers.
    """
    return os.environ.get("STOKER_CCL_HOST") or _identity_of(os.getpid())


@functools.cache
def _identity_of(pid: int) -> str:
    """Read once per process, because every group asks."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with contextlib.suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/net"))
    return " ".join(parts)


def exchange(store: dist.Store, key: str, rank: int, size: int, value: str) -> list[str]:
    """Every rank's `value`, in rank order."""
    keys = [f"{key}/{other}" for other in range(size)]
    store.set(keys[rank], value)
    try:
        others = iter(store.multi_get([key for key in keys if key != keys[rank]]) if size > 1 else [])
        return [value if other == rank else next(others).decode() for other in range(size)]
    except dist.DistStoreError as error:
        missing = next((other for other in range(size) if not store.check([keys[other]])), 0)
        raise dist.DistStoreError(
            f"ccl: rank {missing} of a group of {size} did not join when the group was set up: {str(error).splitlines()[0]}"
        ) from error


def group_by_host(identities: list[str]) -> list[list[int]]:
    """The ranks of each host, hosts in the order of their first rank."""
    hosts: dict[str, list[int]] = {}
    for rank, identity in enumerate(identities):
        hosts.setdefault(identity, []).append(rank)
    return list(hosts.values())


def address_towards(target: str) -> str | None:
    """The address of this host on the route to `target`; None if there is no route. Nothing is sent."""
    with contextlib.suppress(OSError):
        family, _, _, _, destination = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(destination)
            found: str = probe.getsockname()[0]
            return found
    return None


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def own_address(store: dist.Store, rank: int, size: int) -> str | None:
    """The address under which the ranks of other hosts reach this one, found by routing towards them.

    The route towards MASTER_ADDR is tried first. The host of MASTER_ADDR itself finds a loopback address on it, and takes the
    route towards the first rank that has found a real address.
    """
    if chosen := os.environ.get("STOKER_CCL_ADDRESS"):
        return chosen
    towards_master = address_towards(os.environ.get("MASTER_ADDR", "127.0.0.1")) or ""
    found = exchange(store, "address", rank, size, towards_master)
    if towards_master and not _is_loopback(towards_master):
        return towards_master
    real = next((address for address in found if address and not _is_loopback(address)), None)
    return address_towards(real) if real else (towards_master or None)
