"""Limits of this process: CPU affinity, cgroup, shared memory, huge pages and ulimits."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from stoker.machine.cgroup import Cgroup, read_cgroup
from stoker.machine.topology import meminfo
from stoker.machine.tree import Tree, parse_cpu_list, parse_size

__all__ = ["Limits", "Ulimit", "read_limits"]

_ULIMITS = {
    "Max address space": "address space",
    "Max data size": "data size",
    "Max resident set": "resident set",
    "Max cpu time": "cpu time",
    "Max file size": "file size",
    "Max open files": "open files",
    "Max processes": "processes",
    "Max locked memory": "locked memory",
    "Max stack size": "stack size",
}


@dataclass(frozen=True)
class Ulimit:
    """One resource limit of the process; None means unlimited."""

    name: str
    soft: int | None
    hard: int | None


@dataclass(frozen=True)
class Limits:
    affinity: tuple[int, ...] | None
    """CPUs that the scheduler may run this process on."""
    memory_nodes: tuple[int, ...] | None
    """NUMA nodes whose memory this process may use."""
    cgroup: Cgroup
    shm_size: int | None
    """Bytes of /dev/shm."""
    shm_free: int | None
    huge_pages: str | None
    """Transparent huge pages: always, madvise or never."""
    ulimits: tuple[Ulimit, ...]


def read_limits(tree: Tree) -> Limits:
    size, free = _shared_memory(tree)
    chosen = re.search(r"\[(\w+)\]", tree.text("/sys/kernel/mm/transparent_hugepage/enabled") or "")
    return Limits(
        affinity=_affinity(tree),
        memory_nodes=_allowed(tree, "Mems_allowed_list"),
        cgroup=read_cgroup(tree),
        shm_size=size,
        shm_free=free,
        huge_pages=chosen[1] if chosen else None,
        ulimits=_ulimits(tree),
    )


def _affinity(tree: Tree) -> tuple[int, ...] | None:
    if tree.live and hasattr(os, "sched_getaffinity"):
        try:
            return tuple(sorted(os.sched_getaffinity(0)))
        except OSError:
            pass
    return _allowed(tree, "Cpus_allowed_list")


def _allowed(tree: Tree, field: str) -> tuple[int, ...] | None:
    found = re.search(rf"^{field}:[ \t]*(\S+)", tree.text("/proc/self/status") or "", re.M)
    return parse_cpu_list(found[1]) if found else None


def _shared_memory(tree: Tree) -> tuple[int | None, int | None]:
    """Size and free bytes of /dev/shm; for a recorded machine, the size in its mount line."""
    if tree.live:
        try:
            found = os.statvfs("/dev/shm")
        except OSError:
            return None, None
        return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    for line in (tree.text("/proc/self/mountinfo") or "").splitlines():
        left, _, right = line.partition(" - ")
        if left.split()[4:5] == ["/dev/shm"] and right.startswith("tmpfs"):
            size = re.search(r"\bsize=(\w+)", right)
            total = meminfo(tree).get("MemTotal")
            # A tmpfs without a size is limited to half of the memory.
            return (parse_size(size[1]) if size else total and total // 2), None
    return None, None


def _ulimits(tree: Tree) -> tuple[Ulimit, ...]:
    limits = []
    for line in (tree.text("/proc/self/limits") or "").splitlines():
        match = re.match(r"(Max [a-z ]+?)\s{2,}(\w+)\s+(\w+)", line)
        if match and match[1] in _ULIMITS:
            soft, hard = (int(value) if value.isdigit() else None for value in (match[2], match[3]))
            limits.append(Ulimit(_ULIMITS[match[1]], soft, hard))
    return tuple(limits)
