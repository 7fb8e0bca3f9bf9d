"""How the ranks of a group are connected: shared memory within a host, oneCCL or gloo between one leader per host, and gloo
between all ranks for the collectives that have no faster way.

`agree` exchanges what the ranks must have in common, `open_connections` opens what is between them; both are collective over
the group. The collectives themselves are in torch_backend/backend.cpp.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from stoker import __version__
from stoker.comm.gloo_exit import wait_at_exit
from stoker.comm.host_groups import exchange, group_by_host, host_identity, own_address
from stoker.comm.leader_transport import OneCCL, open_oneccl
from stoker.comm.missing_ranks import MissingRanks
from stoker.comm.shared_memory import Offer, SharedMemoryUnavailable, open_shared_memory
from stoker.kernels import native

__all__ = ["Connections", "Member", "agree", "environment_choice", "gloo_group", "log", "open_connections"]

_CHOICES = {
    "STOKER_CCL_BACKEND": ("auto", "compiled"),
    "STOKER_CCL_ENGINE": ("auto", "shm", "oneccl", "gloo"),
    "STOKER_CCL_SHM": ("auto", "memfd", "named"),
}
"""The environment variables and their values; docs/distributed.md explains them."""


def environment_choice(variable: str) -> str:
    """The value of one of the variables above; "auto" if it is unset or empty."""
    value = os.environ.get(variable) or "auto"
    if value not in _CHOICES[variable]:
        raise ValueError(f"{variable}={value!r} is not valid; choose one of {', '.join(_CHOICES[variable])}")
    return value


def log(sentence: str) -> None:
    print(f"stoker ccl: {sentence}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Member:
    """What a rank tells the others of its group when the group is set up."""

    host: str
    engine: str
    memory: str
    version: str
    problem: str
    """Why this rank cannot use the compiled backend; empty if it can."""
    segment: str = ""
    """The address of shared memory that the first rank offers to all; empty on other ranks."""

    @property
    def host_name(self) -> str:
        return self.host.split()[0]


def agree(store: dist.Store, rank: int, names: Sequence[int], problem: str, segment: str = "") -> list[Member]:
    """All members by rank. Where their settings or versions differ, all ranks raise the same ValueError."""
    own = Member(
        host_identity(),
        environment_choice("STOKER_CCL_ENGINE"),
        environment_choice("STOKER_CCL_SHM"),
        own_version(),
        problem,
        segment,
    )
    found = exchange(store, "member", rank, len(names), json.dumps(asdict(own)))
    members = [Member(**json.loads(text)) for text in found]
    for field, what, advice in (
        ("version", "the version", "install the same version on all hosts"),
        ("engine", "STOKER_CCL_ENGINE", "set it to the same value on all ranks"),
        ("memory", "STOKER_CCL_SHM", "set it to the same value on all ranks"),
    ):
        values = [getattr(member, field) for member in members]
        other = next((i for i, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            raise ValueError(
                f"{what} differs between the ranks: rank {names[0]} has {values[0]}, rank {names[other]} has {values[other]}; "
                f"{advice}"
            )
    return members


def own_version() -> str:
    return f"stoker {__version__}, torch {torch.__version__.split('+')[0]}"


@dataclass(frozen=True)
class Connections:
    """What connects one rank with the others of its group."""

    hosts: list[list[int]]
    """The ranks of each host; the first of each is its leader."""
    local_ranks: list[int]
    """The ranks of this host."""
    shared_memory: int
    """A handle of the stoker_comm_* functions, for the ranks of this host; 0 if they cannot share memory, or must not."""
    leaders: Any = None
    """gloo between the leaders; on leaders only, and only with several hosts."""
    oneccl: OneCCL | None = None
    """oneCCL between the leaders, where it is installed."""
    flat: Any = None
    """gloo between all ranks; None where shared memory connects them all."""
    missing_ranks: MissingRanks | None = None
    """Names the missing ranks after a failure that gloo or oneCCL reports."""


def open_connections(
    store: dist.Store,
    rank: int,
    names: Sequence[int],
    members: Sequence[Member],
    timeout: timedelta,
    offer: Offer | None = None,
) -> Connections:
    """`offer`: on the first rank, the shared memory whose address its member has."""
    size, engine = len(names), members[rank].engine
    hosts = group_by_host([member.host for member in members])
    local_ranks = next(ranks for ranks in hosts if rank in ranks)
    handle, reason = 0, "STOKER_CCL_ENGINE=gloo is set"
    if engine != "gloo":
        offered = members[0].segment if len(hosts) == 1 else ""  # it has room for all ranks of the group
        local_names = [names[other] for other in local_ranks]
        prefixed = dist.PrefixStore(f"shm/{local_ranks[0]}", store)
        place, kind = local_ranks.index(rank), members[rank].memory
        try:
            handle = open_shared_memory(
                prefixed, place, local_names, timeout, kind, offered, offer if offered else None
            )
        except SharedMemoryUnavailable as error:
            reason = f"the ranks of a host cannot share memory ({error})"
    if handle and len(hosts) == 1:
        return Connections(hosts, local_ranks, handle)
    # A rank that fails from here on leaves the shared memory: the other ranks of its host would wait for it there.
    with contextlib.ExitStack() as undo:
        if handle:
            undo.callback(native.library().stoker_comm_destroy, handle)
        if (
            len(hosts) > 1
            and "no" in exchange(store, "shared memory", rank, size, "yes" if handle else "no")
            and handle
        ):
            undo.close()
            handle, reason = 0, "the ranks of another host cannot share memory"
        if not handle and rank == 0:
            log(f"gloo carries everything because {reason}")

        address = own_address(store, rank, size)
        leaders, oneccl, problem = None, None, ""
        if handle and rank == local_ranks[0]:
            place = [ranks[0] for ranks in hosts].index(rank)
            leaders = gloo_group(dist.PrefixStore("leaders", store), place, len(hosts), timeout, address)
            if engine in {"auto", "oneccl"}:
                oneccl, problem = open_oneccl(
                    dist.PrefixStore("oneccl", store), place, sorted({member.host for member in members}), leaders, address,
                    timeout, measure=engine == "auto",
                )  # fmt: skip
        if engine == "oneccl":
            _require_oneccl(exchange(store, "oneccl required", rank, size, problem))
        if handle and rank == 0:
            transport = oneccl.describe() if oneccl else f"gloo between the leaders{f' ({problem})' if problem else ''}"
            log(f"{size} ranks on {len(hosts)} hosts: shared memory within a host, {transport}")
        flat = gloo_group(dist.PrefixStore("flat", store), rank, size, timeout, address)
        missing = MissingRanks(
            dist.PrefixStore("missing ranks", store), rank, names, [one.host_name for one in members]
        )
        undo.pop_all()
        return Connections(hosts, local_ranks, handle, leaders, oneccl, flat, missing)


def _require_oneccl(problems: list[str]) -> None:
    """With STOKER_CCL_ENGINE=oneccl all ranks raise if a leader cannot use it."""
    if reasons := list(filter(None, problems)):
        raise RuntimeError(f"STOKER_CCL_ENGINE=oneccl: {reasons[0]}")


def gloo_group(store: dist.Store, rank: int, size: int, timeout: timedelta, address: str | None) -> Any:
    """A gloo backend that listens on `address`; GLOO_SOCKET_IFNAME takes precedence, as everywhere in torch."""
    wait_at_exit()
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timeout
    if os.environ.get("GLOO_SOCKET_IFNAME") or not address:
        options._devices = [gloo.create_default_device()]
    else:
        options._devices = [gloo.create_device(hostname=address)]
    return gloo(store, rank, size, options)
