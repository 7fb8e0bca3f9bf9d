"""CPU topology: SMT siblings, sockets, NUMA nodes, shared caches, and the performance cores of hybrid CPUs."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from stoker.machine.cpuinfo import Processor
from stoker.machine.tree import Tree, parse_size

__all__ = ["Cache", "Core", "Cpu", "Node", "read_caches", "read_cpus", "read_nodes"]

_CPU = "/sys/devices/system/cpu"
_NODE = "/sys/devices/system/node"

# Arm and newer x86 kernels give each CPU a share of 1024. Boost differences between equal cores stay above 0.8; the
# small cores of hybrid CPUs are below 0.6 of the large ones.
_EFFICIENCY_CAPACITY = 0.6


@dataclass(frozen=True)
class Cpu:
    """One logical CPU: what a thread is pinned to."""

    number: int
    core: int
    """The physical core it belongs to: the lowest CPU number among its siblings."""
    socket: int
    node: int
    kind: str
    """performance or efficiency; all CPUs of a machine with one kind are performance."""
    siblings: tuple[int, ...]
    """All logical CPUs of its core, itself included."""


@dataclass(frozen=True)
class Core:
    """One physical core: what a compute thread should have for itself."""

    number: int
    socket: int
    node: int
    kind: str
    cpus: tuple[int, ...]


@dataclass(frozen=True)
class Node:
    """One NUMA node: memory, and the CPUs close to it."""

    number: int
    cpus: tuple[int, ...]
    """Empty for memory without CPUs (HBM, CXL)."""
    memory: int | None
    """Bytes."""
    free: int | None
    distances: tuple[int, ...]
    """To each node, as reported by the firmware; 10 is local."""


@dataclass(frozen=True)
class Cache:
    """One cache of the machine, with the CPUs that share it."""

    level: int
    kind: str
    """data, instruction or unified."""
    size: int | None
    """Bytes."""
    cpus: tuple[int, ...]


def read_cpus(tree: Tree, processors: list[Processor], nodes: tuple[Node, ...]) -> tuple[Cpu, ...]:
    """All CPUs that are online."""
    from_cpuinfo = {int(fields["processor"]): fields for fields in processors if fields["processor"].isdigit()}
    numbers = tree.cpu_list(f"{_CPU}/online") or tuple(sorted(from_cpuinfo)) or _all_cpus(tree)
    node_of = {cpu: node.number for node in nodes for cpu in node.cpus}
    slow = _efficiency_cpus(tree, numbers)
    places: dict[int, tuple[tuple[int, ...], int]] = {}
    for number in numbers:
        if number not in places:  # not set by a sibling
            siblings = _siblings(tree, number, from_cpuinfo)
            socket = _socket(tree, number, from_cpuinfo.get(number, {}))
            places.update((sibling, (siblings, socket)) for sibling in siblings)
    return tuple(
        Cpu(
            number=number,
            core=places[number][0][0],
            socket=places[number][1],
            node=node_of.get(number, 0),
            kind="efficiency" if number in slow else "performance",
            siblings=places[number][0],
        )
        for number in numbers
    )


def _all_cpus(tree: Tree) -> tuple[int, ...]:
    if not tree.live:
        return ()
    import os

    return tuple(range(os.cpu_count() or 1))


def _socket(tree: Tree, number: int, fields: Processor) -> int:
    socket = tree.number(f"{_CPU}/cpu{number}/topology/physical_package_id")
    if socket is None:
        socket = int(fields["physical id"]) if fields.get("physical id", "").isdigit() else 0
    return max(socket, 0)  # -1 if the firmware does not report it


def _siblings(tree: Tree, number: int, others: dict[int, Processor]) -> tuple[int, ...]:
    fields = others.get(number, {})
    topology = f"{_CPU}/cpu{number}/topology"
    listed = tree.cpu_list(f"{topology}/thread_siblings_list") or tree.cpu_list(f"{topology}/core_cpus_list")
    if listed and number in listed:
        return listed
    if "core id" not in fields:
        return (number,)
    place = (fields.get("physical id"), fields["core id"])
    return tuple(sorted(n for n, other in others.items() if (other.get("physical id"), other.get("core id")) == place))


def _efficiency_cpus(tree: Tree, numbers: tuple[int, ...]) -> frozenset[int]:
    fast = tree.cpu_list("/sys/devices/cpu_core/cpus")
    if fast:  # Intel's hybrid CPUs: cpu_atom, and cpu_lowpower on the newest, are the others
        return frozenset(numbers) - frozenset(fast)
    if tree.number(f"{_CPU}/cpu{next(iter(numbers), 0)}/cpu_capacity") is None:
        return frozenset()
    capacities = {n: tree.number(f"{_CPU}/cpu{n}/cpu_capacity") for n in numbers}
    known = {n: capacity for n, capacity in capacities.items() if capacity}
    highest = max(known.values(), default=0)
    return frozenset(n for n, capacity in known.items() if capacity < _EFFICIENCY_CAPACITY * highest)


def read_nodes(tree: Tree, processors: list[Processor]) -> tuple[Node, ...]:
    """The NUMA nodes; a machine without NUMA is one node with everything."""
    numbers = sorted(int(name[4:]) for name in tree.names(_NODE) if re.fullmatch(r"node\d+", name))
    nodes = [_read_node(tree, number) for number in numbers]
    memory = meminfo(tree)
    if len(nodes) == 1 and nodes[0].cpus:
        # Memory that a hypervisor adds after boot may be missing from the node's own count; with one node both must be equal.
        total, free = memory.get("MemTotal", nodes[0].memory), memory.get("MemFree", nodes[0].free)
        return (replace(nodes[0], memory=total, free=free),)
    if any(node.cpus for node in nodes):
        return tuple(nodes)
    everything = tree.cpu_list(f"{_CPU}/online") or tuple(
        sorted(int(fields["processor"]) for fields in processors if fields["processor"].isdigit())
    )
    return (
        Node(
            number=0,
            cpus=everything or _all_cpus(tree),
            memory=memory.get("MemTotal"),
            free=memory.get("MemFree"),
            distances=(10,),
        ),
    )


def _read_node(tree: Tree, number: int) -> Node:
    where = f"{_NODE}/node{number}"
    memory = dict(re.findall(r"^Node \d+ (\w+):\s+(\d+) kB", tree.text(f"{where}/meminfo") or "", re.M))
    distances = (tree.text(f"{where}/distance") or "").split()
    return Node(
        number=number,
        cpus=tree.cpu_list(f"{where}/cpulist") or (),
        memory=int(memory["MemTotal"]) << 10 if "MemTotal" in memory else None,
        free=int(memory["MemFree"]) << 10 if "MemFree" in memory else None,
        distances=tuple(int(d) for d in distances if d.isdigit()),
    )


def meminfo(tree: Tree) -> dict[str, int]:
    """/proc/meminfo in bytes."""
    found = re.findall(r"^([\w()]+):\s+(\d+) kB", tree.text("/proc/meminfo") or "", re.M)
    return {key: int(kilobytes) << 10 for key, kilobytes in found}


def read_caches(tree: Tree, cpus: tuple[Cpu, ...]) -> tuple[Cache, ...]:
    """Each cache once.

    CPUs whose cache was already read are skipped, and caches of the same kind of core with the same number of CPUs are assumed
    to be equal: both save reading thousands of files on a large machine.
    """
    caches: list[Cache] = []
    covered: set[tuple[str, int]] = set()
    known: dict[tuple[str, str, int], Cache] = {}
    for cpu in cpus:
        for index in ("index0", "index1", "index2", "index3", "index4"):
            if (index, cpu.number) in covered:
                continue
            where = f"{_CPU}/cpu{cpu.number}/cache/{index}"
            shared = tree.cpu_list(f"{where}/shared_cpu_list")
            if shared is None:
                break
            shared = shared or (cpu.number,)
            covered.update((index, number) for number in shared)
            alike = (index, cpu.kind, len(shared))
            if alike not in known:
                known[alike] = Cache(
                    level=tree.number(f"{where}/level") or 0,
                    kind=(tree.text(f"{where}/type") or "unknown").lower(),
                    size=parse_size(tree.text(f"{where}/size")),
                    cpus=shared,
                )
            caches.append(replace(known[alike], cpus=shared))
    return tuple(sorted(caches, key=lambda cache: (cache.level, cache.kind, cache.cpus)))
