"""`stoker.distributed.setup()`: the one line inside a function that another engine runs in each of its processes.

Ray Train, Spark's TorchDistributor, Lightning Fabric, torch.multiprocessing and others start the ranks themselves, so there is
nothing to launch. This gives each rank what `stoker launch` would have given it: its share of the machine's cores and
threads, the process group, and the hooks by which transformers' Trainer and accelerate's Accelerator optimise their models.
"""

from __future__ import annotations

import logging
import os
import sys
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from stoker.comm.host_groups import group_by_host, host_identity
from stoker.distributed import messages
from stoker.errors import UserError
from stoker.hf import ddp_backend
from stoker.hf.compat import install
from stoker.launch.placement import binding
from stoker.launch.rank.environment import Rank, discover
from stoker.launch.rank.rank_settings import Settings
from stoker.machine import Machine
from stoker.machine.tree import format_cpu_list

__all__ = ["Joined", "setup"]

log = logging.getLogger("stoker")

_ALONE = Rank("no launcher", 0, 1, 0, 1, "nothing")
_done: Joined | None = None
"""What the first call in this process did."""


@dataclass(frozen=True)
class Joined:
    """This process's place in the job, and what it got."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    """How many ranks of the job are on this machine."""
    threads: int
    cpus: tuple[int, ...]
    """The CPUs that it is pinned to; empty: not pinned."""
    backend: str | None
    """That of the process group; None if there is none."""

    def __str__(self) -> str:
        cores = f", pinned to CPUs {format_cpu_list(self.cpus)}" if self.cpus else ""
        return (
            f"rank {self.rank} of {self.size}, {self.local_rank} of {self.local_size} on this machine: {self.threads} "
            f"thread{'s' * (self.threads != 1)}{cores}, backend {self.backend or 'none'}"
        )


def setup(
    *, backend: str | None = "ccl", threads: int | None = None, pin: bool = True, optimise: bool = True
) -> Joined:
    """Prepares this process, which an engine has started as a rank; the first line of the function that the engine runs.

    `backend`: joins a process group with it, unless the engine has made one; None leaves that to you. `threads`: per rank; by
    default its share of the cores, or OMP_NUM_THREADS if that is set to more than 1. `pin=False` leaves it to the system on
    which cores they run. `optimise=False` leaves the models of Trainer and Accelerator alone. A second call changes nothing.
    """
    global _done
    if _done is not None:
        return _done
    if threads is not None and threads < 1:
        raise UserError(f"setup: threads is {threads}; it must be at least 1")
    imported_before = optimise and "transformers.trainer" in sys.modules
    rank = discover(os.environ) or _ALONE
    if backend is not None and rank.size > 1 and rank.exchange == "given" and not dist.is_initialized():
        _join(backend)
    rank = _placed(rank)
    share, cpus = _take_share(rank, threads, pin)
    install(optimise=optimise, backend=backend, first=rank.rank == 0, off="setup(optimise=False)")
    os.environ.setdefault("ACCELERATE_USE_CPU", "true")
    found = dist.get_backend() if dist.is_initialized() else None
    _done = Joined(rank.rank, rank.size, rank.local_rank, rank.local_size, share, cpus, found)
    if rank.rank == 0:
        _report(_done, backend, imported_before)
    return _done


def _join(backend: str) -> None:
    choice = ddp_backend.choose(backend)
    if choice.note:
        log.warning("setup: %s", choice.note)
    ddp_backend.join(choice.name)


def _placed(rank: Rank) -> Rank:
    """The rank with its place on this machine, found by asking the others where there is a group."""
    if not dist.is_initialized():
        return rank
    own, size = dist.get_rank(), dist.get_world_size()
    mask = tuple(sorted(os.sched_getaffinity(0)))
    everyone = messages.all_gather((host_identity(), mask))
    here = next(ranks for ranks in group_by_host([host for host, _ in everyone]) if own in ranks)
    placed = replace(rank, rank=own, size=size, local_rank=here.index(own), local_size=len(here))
    others = [everyone[other][1] for other in here if other != own]
    if others and all(set(mask).isdisjoint(other) for other in others):
        return replace(placed, launcher=_PINNED)  # the engine has given each rank cores of its own
    return placed


_PINNED = "an engine that pins"


def _take_share(rank: Rank, threads: int | None, pin: bool) -> tuple[int, tuple[int, ...]]:
    """Sets threads and mask of this process; returns how many and which."""
    environment = dict(os.environ)
    if environment.get("OMP_NUM_THREADS") == "1":  # the default of torchrun and Ray, not a choice
        del environment["OMP_NUM_THREADS"]
    settings = Settings(threads=threads, oversubscribe=rank.local_size > len(Machine.read().usable_cores))
    local = (0, 1) if rank.launcher == _PINNED else (rank.local_rank, rank.local_size)
    placement, note = binding.choose(settings, Machine.read(), *local, environment)
    assert placement is not None  # bind is "auto"
    os.environ.update(binding.thread_variables(placement))
    notes = [note] if note else []
    cpus: tuple[int, ...] = ()
    if pin:
        notes += binding.bind(placement)
        cpus = tuple(sorted(os.sched_getaffinity(0)))
        _pin_threads(cpus)
    torch.set_num_threads(placement.threads)
    for line in notes if rank.rank == 0 else ():
        log.warning("setup: %s", line)
    return placement.threads, cpus


def _pin_threads(cpus: tuple[int, ...]) -> None:
    """Pins the threads that exist already too: torch's, if the engine has computed something before."""
    for thread in os.listdir("/proc/self/task"):
        with suppress(OSError):  # it has ended
            os.sched_setaffinity(int(thread), cpus)


def _report(joined: Joined, wanted: str | None, imported_before: bool) -> None:
    print(f"stoker: {joined}", file=sys.stderr, flush=True)
    if joined.size > 1 and joined.backend is not None and wanted not in (None, joined.backend):
        print(
            f"stoker: the engine's process group uses {joined.backend} and is kept; tell the engine to use {wanted}, which is "
            "faster",
            file=sys.stderr,
        )
    if imported_before:
        print(
            "stoker: transformers' Trainer was imported before setup(), and a name imported earlier is still the stock class: "
            "import it in the function, after setup()",
            file=sys.stderr,
        )
