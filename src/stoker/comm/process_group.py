"""Creates a process group of the backend "ccl" when torch.distributed asks for one.

It is the compiled backend (torch_backend/backend.cpp) over the connections that connections.py opens. Where a rank of the group
cannot compile or load it, all ranks of the group use gloo instead, and one sentence says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from stoker.comm.compiled import CompiledUnavailable, load
from stoker.comm.connections import Member, agree, environment_choice, gloo_group, log, open_connections
from stoker.comm.host_groups import own_address
from stoker.comm.shared_memory import Offer

__all__ = ["create"]

_logged: set[str] = set()


def create(options: Any) -> Any:
    """Called by torch.distributed on all ranks of a new group, with torch's _DistributedBackendOptions."""
    store, rank, size, timeout = options.store, options.group_rank, options.group_size, options.timeout
    names = tuple(options.global_ranks_in_group) or tuple(range(size))
    required = environment_choice("STOKER_CCL_BACKEND") == "compiled"
    module, problem = _load()
    offer = Offer(size, named=False) if rank == 0 and not problem else None
    try:
        members = agree(store, rank, names, problem, offer.address if offer else "")
        for member in members:
            if member.problem:
                if required or member.engine == "oneccl":
                    raise CompiledUnavailable(
                        f"the ccl backend is not compiled on {member.host_name}: {member.problem}"
                    )
                return _gloo_instead(store, rank, names, members, member, timeout)
        connections = open_connections(store, rank, names, members, timeout, offer)
    finally:
        if offer:
            offer.withdraw()
    missing_ranks, oneccl = connections.missing_ranks, connections.oneccl
    library = oneccl.library if oneccl else None
    other_leaders = [ranks[0] for ranks in connections.hosts if rank not in ranks]

    return module.create(
        rank=rank,
        size=size,
        shared_memory=connections.shared_memory,
        local_ranks=connections.local_ranks,
        local_names=[names[other] for other in connections.local_ranks],
        hosts=len(connections.hosts),
        leaders=connections.leaders,
        flat=connections.flat,
        oneccl_library=library._handle if library else 0,
        oneccl=oneccl.handle if oneccl else 0,
        oneccl_carries=list(oneccl.carries) if oneccl else [],
        other_hosts=missing_ranks.describe(other_leaders) if missing_ranks else "",
        timeout=timeout.total_seconds(),
        explain=missing_ranks,
    )


def _load() -> tuple[Any, str]:
    """The compiled module, or None and the reason."""
    try:
        return load(), ""
    except CompiledUnavailable as error:
        return None, str(error)


def _gloo_instead(
    store: dist.Store, rank: int, names: Sequence[int], members: Sequence[Member], cause: Member, timeout: timedelta
) -> Any:
    where = f" on {cause.host_name}" if len({member.host for member in members}) > 1 else ""
    if rank == 0 and cause.problem not in _logged:
        log(f"ccl runs on gloo, which is slower, because the backend could not be compiled{where}: {cause.problem}")
    _logged.add(cause.problem)  # on all ranks: the first rank of a sub-group need not repeat what rank 0 has logged
    group = gloo_group(store, rank, len(names), timeout, own_address(store, rank, len(names)))
    group._set_sequence_number_for_group()
    return group
