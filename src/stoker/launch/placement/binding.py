"""Binds this process to its share of the machine: affinity mask, memory policy, thread count.

No numactl and no privileges are needed; what a container forbids is skipped and reported.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
from collections.abc import Mapping
from dataclasses import replace

from stoker.english import counted
from stoker.errors import UserError
from stoker.launch.placement.divide_cores import Oversubscribed, Placement, place
from stoker.launch.rank.rank_settings import Settings
from stoker.machine import Machine
from stoker.machine.tree import format_cpu_list
from stoker.numbers import whole_number

__all__ = ["PINNED_BY_HAND", "bind", "choose", "choose_all", "choose_in_rank", "thread_variables"]

_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}  # asm/unistd.h
_MPOL_BIND, _MPOL_INTERLEAVE = 2, 3  # linux/mempolicy.h

# Users set these in order to have the launcher's own pinning, which is then kept.
PINNED_BY_HAND = ("I_MPI_PIN_DOMAIN", "I_MPI_PIN_PROCESSOR_LIST", "I_MPI_PIN_CELL", "I_MPI_PIN_ORDER")


def choose(
    settings: Settings, machine: Machine, local_rank: int, local_size: int, environment: Mapping[str, str]
) -> tuple[Placement | None, str | None]:
    """The share of one local rank (None: do not pin), and a note if OMP_NUM_THREADS could not be used."""
    shares, note = choose_all(settings, machine, local_size, environment)
    return (shares[local_rank] if shares else None), note


def choose_all(
    settings: Settings, machine: Machine, local_size: int, environment: Mapping[str, str]
) -> tuple[tuple[Placement, ...], str | None]:
    """The shares of all local ranks; empty if nothing is to be pinned."""
    if settings.bind == "none":
        return (), None
    ranks = local_size
    pinned = settings.bind == "keep" or any(name in environment for name in PINNED_BY_HAND)
    if pinned or len(machine.usable_cores) < local_size == 1:
        local_size = 1
    place_with = functools.partial(
        place, machine, local_size, workers=settings.ccl_workers or 0, logical=settings.logical,
        efficiency=settings.efficiency, nodes=settings.nodes, oversubscribe=settings.oversubscribe,
    )  # fmt: skip
    threads, note = settings.threads, None
    inherited = whole_number(environment.get("OMP_NUM_THREADS", "").split(",")[0])
    if threads is None and inherited is not None and inherited >= 0:
        threads = inherited
        try:
            place_with(threads=inherited)
        except UserError:  # a number from another day must not oversubscribe this machine
            kept = (
                f" with {counted(settings.ccl_workers, 'core')} kept for communication" if settings.ccl_workers else ""
            )
            note = (
                f"OMP_NUM_THREADS={inherited} is more than each process's share of this machine{kept}; the share is used "
                "instead"
            )
            threads = None
    shares = place_with(threads=threads, cores_per_process=settings.cores_per_process)
    return shares if ranks == local_size else shares * ranks, note


def choose_in_rank(
    settings: Settings, machine: Machine, local_rank: int, local_size: int, environment: Mapping[str, str]
) -> tuple[Placement | None, list[str]]:
    """The share of this rank, and notes. If another launcher has started more processes than fit, they share the cores."""
    try:
        placement, note = choose(settings, machine, local_rank, local_size, environment)
        return placement, [note] if note else []
    except Oversubscribed as error:
        if settings.outer_launcher is None:
            raise
        # Whoever started the processes has decided how many there are.
        warning = f"{counted(local_size, 'process')} share this machine's cores, and will be slow: {error.shortage}"
        given = {**environment, "OMP_NUM_THREADS": ""}  # it was for more cores
        placement, note = choose(replace(settings, oversubscribe=True), machine, local_rank, local_size, given)
        return placement, [warning, *([note] if note else [])]


def thread_variables(placement: Placement) -> dict[str, str]:
    """What OpenMP, MKL and oneCCL read. torch's wheels use GNU OpenMP, for which the mask is enough to pin threads."""
    found = {"OMP_NUM_THREADS": str(placement.threads), "MKL_NUM_THREADS": str(placement.threads)}
    if placement.worker_cpus:
        found["CCL_WORKER_COUNT"] = str(len(placement.worker_cpus))
        found["CCL_WORKER_AFFINITY"] = ",".join(map(str, placement.worker_cpus))
    if placement.siblings or placement.worker_cpus:  # for the ccl backend's own threads
        found["STOKER_CCL_CPUS"] = format_cpu_list(placement.worker_cpus or placement.siblings)
    return found


def bind(placement: Placement) -> list[str]:
    """Applies a placement to this process and its future children; returns a message for each part that was refused."""
    refused = []
    try:
        os.sched_setaffinity(0, placement.cpus + placement.worker_cpus)
    except (OSError, AttributeError) as error:
        refused.append(f"cores {format_cpu_list(placement.cpus)} could not be reserved: {error}")
    if placement.nodes and not _bind_memory(placement.nodes, placement.spread):
        refused.append(
            f"memory could not be bound to NUMA node {format_cpu_list(placement.nodes)}; containers need CAP_SYS_NICE for it"
        )
    return refused


def _bind_memory(nodes: tuple[int, ...], spread: bool) -> bool:
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        return False
    words = max(nodes) // 64 + 1
    mask = (ctypes.c_uint64 * words)()
    for node in nodes:
        mask[node // 64] |= 1 << (node % 64)
    library = ctypes.CDLL(None, use_errno=True)
    # Threads on several nodes use freed memory again, whoever touched it first: spread evenly, it has the bandwidth of all nodes.
    policy = _MPOL_INTERLEAVE if spread else _MPOL_BIND
    return bool(library.syscall(number, policy, ctypes.byref(mask), ctypes.c_ulong(words * 64 + 1)) == 0)
