"""Puts a process on its share of the machine, from inside: affinity mask, memory policy, thread count.

No numactl and no privilege is needed; what a container forbids is left undone and said.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Mapping

from stoker.english import counted
from stoker.errors import UserError
from stoker.launch.placement.divide_cores import Placement, place
from stoker.launch.rank.rank_settings import Settings
from stoker.machine import Machine
from stoker.numbers import whole_number

__all__ = ["PINNED_BY_HAND", "bind", "choose", "choose_all", "ranges", "thread_variables"]

_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}  # asm/unistd.h
_MPOL_BIND = 2  # linux/mempolicy.h

# Set by a person, these mean that the launcher's pinning is wanted as it is.
PINNED_BY_HAND = ("I_MPI_PIN_DOMAIN", "I_MPI_PIN_PROCESSOR_LIST", "I_MPI_PIN_CELL", "I_MPI_PIN_ORDER")


def choose(
    settings: Settings, machine: Machine, local_rank: int, local_size: int, environment: Mapping[str, str]
) -> tuple[Placement | None, str | None]:
    """The share of local rank `local_rank`, and a line where a wish could not be followed; None: leave all as it is."""
    shares, note = choose_all(settings, machine, local_size, environment)
    return (shares[local_rank] if shares else None), note


def choose_all(
    settings: Settings, machine: Machine, local_size: int, environment: Mapping[str, str]
) -> tuple[tuple[Placement, ...], str | None]:
    """The shares of all local ranks; none: leave all as it is."""
    if settings.bind == "none":
        return (), None
    ranks = local_size
    pinned = settings.bind == "keep" or any(name in environment for name in PINNED_BY_HAND)
    if pinned or len(machine.usable_cores) < local_size == 1:
        local_size = 1
    threads, note = settings.threads, None
    inherited = whole_number(environment.get("OMP_NUM_THREADS", "").split(",")[0])
    if threads is None and inherited is not None and inherited >= 0:
        threads, note = _inherited_threads(inherited, settings, machine, local_size)
    shares = place(
        machine,
        local_size,
        threads=threads,
        workers=settings.workers,
        logical=settings.logical,
        efficiency=settings.efficiency,
        cores_per_process=settings.cores_per_process,
        nodes=settings.nodes,
        oversubscribe=settings.oversubscribe,
    )
    return shares if ranks == local_size else shares * ranks, note


def _inherited_threads(
    threads: int, settings: Settings, machine: Machine, local_size: int
) -> tuple[int | None, str | None]:
    """OMP_NUM_THREADS is followed where it fits; a number from another day must not oversubscribe this machine."""
    if settings.oversubscribe:
        return threads, None
    try:
        place(
            machine,
            local_size,
            threads=threads,
            workers=settings.workers,
            logical=settings.logical,
            efficiency=settings.efficiency,
            nodes=settings.nodes,
        )
    except UserError:
        kept = f" with {counted(settings.workers, 'core')} kept for communication" if settings.workers else ""
        note = f"OMP_NUM_THREADS={threads} is more than each process's share of this machine{kept}; the share is used instead"
        return None, note
    return threads, None


def thread_variables(placement: Placement) -> dict[str, str]:
    """What OpenMP, MKL and oneCCL read. torch's wheels use GNU OpenMP, for which the mask is enough to pin threads."""
    found = {"OMP_NUM_THREADS": str(placement.threads), "MKL_NUM_THREADS": str(placement.threads)}
    if placement.worker_cpus:
        found["CCL_WORKER_COUNT"] = str(len(placement.worker_cpus))
        found["CCL_WORKER_AFFINITY"] = ",".join(map(str, placement.worker_cpus))
    return found


def bind(placement: Placement) -> list[str]:
    """Applies a placement to this process and what it starts from now on; returns what was refused."""
    refused = []
    try:
        os.sched_setaffinity(0, placement.cpus + placement.worker_cpus)
    except (OSError, AttributeError) as error:
        refused.append(f"cores {ranges(placement.cpus)} could not be reserved: {error}")
    if placement.nodes and not _bind_memory(placement.nodes):
        refused.append(
            f"memory could not be bound to NUMA node {ranges(placement.nodes)}; containers need CAP_SYS_NICE for it"
        )
    return refused


def _bind_memory(nodes: tuple[int, ...]) -> bool:
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        return False
    words = max(nodes) // 64 + 1
    mask = (ctypes.c_uint64 * words)()
    for node in nodes:
        mask[node // 64] |= 1 << (node % 64)
    library = ctypes.CDLL(None, use_errno=True)
    return bool(library.syscall(number, _MPOL_BIND, ctypes.byref(mask), ctypes.c_ulong(words * 64 + 1)) == 0)


def ranges(numbers: tuple[int, ...]) -> str:
    """0-3,8: as taskset writes it."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in parts)
