"""The ways between the ranks of a group: shared memory within a host, one leader per host on the wire (oneCCL or gloo),
and gloo between all ranks for the rest.

`open_paths` lets all ranks of a group agree on them; the process groups (process_group.py, python_group.py) only travel them.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from stoker import __version__
from stoker.comm.engine import SharedMemory, SharedMemoryUnavailable, chosen_memory
from stoker.comm.host_groups import exchange, group_by_host, host_identity, own_address
from stoker.comm.missing_ranks import RollCall
from stoker.comm.wire import OneCCL, open_oneccl

__all__ = ["ENGINES", "Paths", "chosen_engine", "open_paths"]

ENGINES = ("auto", "shm", "gloo", "oneccl")
"""What STOKER_CCL_ENGINE may be. auto: shared memory within hosts, between them what measures faster; shm: shared memory and
gloo; oneccl: shared memory and oneCCL, or an error; gloo: gloo for everything."""


@dataclass(frozen=True)
class Paths:
    """What one rank of a group needs to reach the others."""

    rank: int
    size: int
    names: tuple[int, ...]
    """The ranks' numbers in the whole job."""
    hosts: tuple[tuple[int, ...], ...]
    """The ranks of each host; the first of each leads it."""
    timeout: timedelta
    store: dist.Store
    local: SharedMemory | None
    """The ranks of this host; None if they cannot share memory, or must not."""
    leaders: Any = None
    """gloo between the leaders; on leaders only, and only with several hosts."""
    wire: OneCCL | None = None
    """oneCCL between the leaders, where it is installed."""
    flat: Any = None
    """gloo between all ranks, for what shared memory does not cover."""
    here: tuple[int, ...] = field(default=())
    """The ranks of this host."""
    roll_call: RollCall | None = None
    """Who is missing, where something between hosts has failed; on groups over several hosts, or without shared memory."""

    @property
    def one_host(self) -> bool:
        return self.local is not None and len(self.hosts) == 1

    @property
    def hierarchical(self) -> bool:
        return self.local is not None and len(self.hosts) > 1

    @property
    def beyond(self) -> str:
        """How errors call the other hosts: by the ranks that lead them."""
        leaders = [ranks[0] for ranks in self.hosts if self.rank not in ranks]
        return self.roll_call.named(leaders) if self.roll_call is not None else ""

    def close(self) -> None:
        if self.local is not None:
            self.local.close()


def chosen_engine() -> str:
    asked = os.environ.get("STOKER_CCL_ENGINE") or "auto"
    if asked not in ENGINES:
        raise ValueError(f"STOKER_CCL_ENGINE={asked!r} is not an engine; choose one of {', '.join(ENGINES)}")
    return asked


def open_paths(store: dist.Store, rank: int, size: int, names: tuple[int, ...], timeout: timedelta) -> Paths:
    """Meets the other ranks through `store` and opens what is needed between them. Collective over the group."""
    engine, memory = chosen_engine(), chosen_memory()
    identities = exchange(store, "host", rank, size, host_identity())
    hosts = tuple(tuple(ranks) for ranks in group_by_host(identities))
    _agree(names, "STOKER_CCL_ENGINE", exchange(store, "engine", rank, size, engine), "set it alike on all")
    _agree(names, "STOKER_CCL_SHM", exchange(store, "memory", rank, size, memory), "set it alike on all")
    _agree(names, "the version", exchange(store, "version", rank, size, _version()), "install the same on all hosts")
    host_names = "\n".join(sorted(set(identities)))
    here = next(ranks for ranks in hosts if rank in ranks)
    local, reason = None, f"STOKER_CCL_ENGINE={engine}"
    if engine != "gloo":
        local, reason = _open_local(store, rank, here, names, timeout)
    if len(set(exchange(store, "local", rank, size, "yes" if local else "no"))) > 1 and local:
        local.close()
        local, reason = None, "another host has none"
    if local is not None and len(hosts) == 1:
        return Paths(rank, size, names, hosts, timeout, store, local, here=here)
    if local is None and rank == 0:
        _say(f"no shared memory between the ranks of a host ({reason}); gloo carries everything")
    address = own_address(store, rank, size)
    leaders = None
    if local is not None and rank == here[0]:
        place = [ranks[0] for ranks in hosts].index(rank)
        leaders = _gloo(dist.PrefixStore("leaders", store), place, len(hosts), timeout, address)
    wire, between = None, ""
    if leaders is not None and engine in {"auto", "oneccl"}:
        wire, between = open_oneccl(
            dist.PrefixStore("oneccl", store),
            place,
            len(hosts),
            host_names,
            leaders,
            address,
            timeout,
            engine == "oneccl",
        )
    _require(store, rank, size, engine, between)
    if local is not None and rank == 0:
        means = wire.described() if wire else "gloo"
        why = f" ({between})" if between else ""
        _say(f"{size} ranks on {len(hosts)} hosts: shared memory within a host, {means} between the leaders{why}")
    flat = _gloo(dist.PrefixStore("flat", store), rank, size, timeout, address)
    roll_call = RollCall(dist.PrefixStore("roll call", store), rank, names, [one.split()[0] for one in identities])
    return Paths(rank, size, names, hosts, timeout, store, local, leaders, wire, flat, here, roll_call)


def _version() -> str:
    return f"stoker {__version__}, torch {torch.__version__.split('+')[0]}"


def _agree(names: tuple[int, ...], what: str, values: list[str], remedy: str) -> None:
    """All ranks raise, and name one of each side, where `values` differ."""
    other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
    if other is not None:
        raise ValueError(
            f"{what} differs between the ranks: rank {names[0]} has {values[0]}, rank {names[other]} has {values[other]}; "
            f"{remedy}"
        )


def _require(store: dist.Store, rank: int, size: int, engine: str, trouble: str) -> None:
    """Where oneCCL was asked for by name, all ranks raise if any leader cannot have it."""
    if engine != "oneccl":
        return
    if reasons := list(filter(None, exchange(store, "oneccl required", rank, size, trouble))):
        raise RuntimeError(f"STOKER_CCL_ENGINE=oneccl: {reasons[0]}")


def _open_local(
    store: dist.Store, rank: int, here: tuple[int, ...], names: tuple[int, ...], timeout: timedelta
) -> tuple[SharedMemory | None, str]:
    try:
        place = here.index(rank)
        prefix = dist.PrefixStore(f"shm/{here[0]}", store)
        return SharedMemory.open(prefix, place, len(here), [names[other] for other in here], timeout), ""
    except SharedMemoryUnavailable as error:
        return None, str(error)


def _gloo(store: dist.Store, rank: int, size: int, timeout: timedelta, address: str | None) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timeout
    if os.environ.get("GLOO_SOCKET_IFNAME") or not address:
        options._devices = [gloo.create_default_device()]
    else:
        options._devices = [gloo.create_device(hostname=address)]
    return gloo(store, rank, size, options)


def _say(sentence: str) -> None:
    print(f"stoker ccl: {sentence}", file=sys.stderr, flush=True)
