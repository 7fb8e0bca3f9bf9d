"""The process group of CPU runs: which torch.distributed backend serves, and joining it.

transformers and accelerate can join by themselves, but on CPUs they know only gloo and mpi, and ignore the timeout.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from stoker.distributed.lost_rank import healing_directory
from stoker.distributed.regroup import HealingGroup
from stoker.numbers import whole_number
from stoker.requires import supported

__all__ = ["Choice", "alias_ccl", "choose", "join", "several_processes"]


@dataclass(frozen=True)
class Choice:
    name: str
    """The backend to pass to init_process_group."""
    note: str | None = None
    """One line for the user if it is not the backend that was requested."""


def choose(requested: str | None) -> Choice:
    """The backend for CPU tensors if the user requested this one; None is the default."""
    if requested in (None, "", "gloo"):
        return Choice("gloo")
    if requested in ("ccl", "mpi"):
        if dist.is_backend_available(requested) and (requested != "ccl" or supported("ccl")):
            return Choice(requested)
        return Choice("gloo", f"backend {requested} is not available, so gloo is used; the results are the same")
    return Choice("gloo", f"backend {requested} does not support CPUs, so gloo is used")


def several_processes() -> bool:
    """Whether a launcher started this process as one of several, by the variables that accelerate reads."""
    names = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "WORLD_SIZE")
    return "LOCAL_RANK" in os.environ or any((whole_number(os.environ.get(name, "")) or 1) > 1 for name in names)


def join(backend: str | None, timeout: timedelta | None = None) -> None:
    """Joins the other processes, unless there are none or this was done already; `backend` None: accelerate's choice."""
    if dist.is_initialized() or not several_processes() or not supported("process group"):
        return
    from accelerate import PartialState
    from accelerate.utils import get_cpu_distributed_information

    given: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    if healing_directory() is not None and backend != "mpi" and supported("healing"):
        this = get_cpu_distributed_information()
        HealingGroup(backend or "gloo", this.rank, this.world_size, timeout or timedelta(minutes=30))
        given["backend"] = "gloo"  # accelerate takes the group that exists
    elif backend == "ccl":  # unknown to accelerate, which takes a group that exists
        this = get_cpu_distributed_information()
        dist.init_process_group(backend, rank=this.rank, world_size=this.world_size, **given)
    elif backend is not None:
        given["backend"] = backend
    PartialState(cpu=True, **given)


def alias_ccl() -> str | None:
    """Makes init_process_group("ccl") use gloo where ccl is not available; returns the line for the user, None if it is."""
    choice = choose("ccl")
    if choice.name == "ccl":
        return None
    dist.Backend.register_backend("ccl", _gloo, devices=["cpu"])
    return choice.note


def _gloo(store: Any, rank: int, size: int, timeout: Any) -> Any:
    return dist.ProcessGroupGloo(store, rank, size, timeout)
