"""Divides the cores, memory nodes and threads of a host over its processes: pure functions of `Machine`.

Processes get whole physical cores, inside one NUMA node, or at least one socket, where the numbers allow it. Each process binds
itself (`stoker.launch.placement.binding`).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from stoker.english import counted
from stoker.errors import UserError
from stoker.machine import Core, Machine

__all__ = ["Oversubscribed", "Placement", "place"]


class Oversubscribed(UserError):
    """There are fewer cores than the processes want."""

    def __init__(self, shortage: str, advice: str) -> None:
        super().__init__(f"{shortage}. {advice}")
        self.shortage = shortage


@dataclass(frozen=True)
class Placement:
    """The share of a host that one process gets."""

    local_rank: int
    cpus: tuple[int, ...]
    """Logical CPUs for computing; the affinity mask holds these and `worker_cpus`."""
    worker_cpus: tuple[int, ...]
    """Logical CPUs kept for communication workers."""
    nodes: tuple[int, ...]
    """NUMA nodes of its cores, or the nearest ones with memory, to which memory is bound. Empty: nothing to bind."""
    threads: int
    siblings: tuple[int, ...] = ()
    """The second hardware threads of its cores, which do no arithmetic: threads that communicate run there."""
    spread: bool = False
    """Its threads need the cores of several nodes: memory is spread over `nodes` instead of following the first touch."""


def place(
    machine: Machine,
    processes: int,
    *,
    threads: int | None = None,
    workers: int = 0,
    logical: bool = False,
    efficiency: bool = False,
    cores_per_process: int | None = None,
    nodes: Sequence[int] | None = None,
    oversubscribe: bool = False,
) -> tuple[Placement, ...]:
    """Divides the usable cores of `machine` over `processes`.

    `workers` cores per process are kept for communication, `logical` counts SMT siblings as places for threads,
    `efficiency` takes the small cores of a hybrid CPU too, `nodes` restricts to those NUMA nodes.
    """
    if processes < 1:
        raise UserError(f"number of processes per machine is {processes}; it must be at least 1")
    cores = _candidates(machine, efficiency, nodes)
    budget = _budget(machine, cores, logical)
    if not oversubscribe:
        computing = cores_per_process or max(threads or 1, 1)
        _refuse_oversubscription(machine, cores, processes, computing, workers, budget, logical)
    shares = _shares(cores, processes, cores_per_process, workers)
    allowed = max(budget // processes - workers, 1)  # of a quota that is smaller than the cores
    return tuple(
        _placement(rank, share, machine, threads, workers, logical, allowed) for rank, share in enumerate(shares)
    )


def _candidates(machine: Machine, efficiency: bool, nodes: Sequence[int] | None) -> list[Core]:
    cores = list(machine.usable_cores if efficiency else machine.fast_cores)
    if nodes is not None:
        present = {core.node for core in cores}
        for node in nodes:
            if node not in present:
                raise UserError(
                    f"--nodes_list names NUMA node {node}; this machine's usable nodes are {_listed(sorted(present))}"
                )
        cores = [core for core in cores if core.node in nodes]
    # Neighbours share caches; nodes and sockets stay together.
    return sorted(cores, key=lambda core: (core.socket, core.node, core.number))


def _budget(machine: Machine, cores: list[Core], logical: bool) -> int:
    """Threads that can run at once: one per core, or as many as the container's quota allows."""
    places = sum(len(core.cpus) for core in cores) if logical else len(cores)
    return max(min(places, int(machine.quota)) if machine.quota is not None else places, 1)


def _refuse_oversubscription(
    machine: Machine, cores: list[Core], processes: int, computing: int, workers: int, budget: int, logical: bool
) -> None:
    wanted = computing + workers
    if processes * wanted <= budget:
        return
    kind = "logical CPUs" if logical else "physical cores"
    quota = f", of which the container's quota allows {machine.quota:g}" if machine.quota is not None else ""
    places = sum(len(core.cpus) for core in cores) if logical else len(cores)
    fitting = budget // wanted
    fewer = f"at most {counted(fitting, 'process')}, fewer threads" if fitting else "fewer threads"
    kept = f" and {counted(workers, 'core')} for communication" if workers else ""
    each = " each" if workers and processes > 1 else ""
    raise Oversubscribed(
        f"{counted(processes, 'process')} of {counted(computing, 'thread')}{kept}{each} "
        f"need{'s' * (processes == 1)} {processes * wanted} {kind}; this machine has {places} for them{quota}",
        f"Use {fewer}{' or cores for communication' if workers else ''}, or allow sharing with --oversubscribe",
    )


def _shares(cores: list[Core], processes: int, cores_per_process: int | None, workers: int) -> list[list[Core]]:
    """The cores of each process: divided by node if the processes fit evenly, else by socket, else consecutively."""
    if cores_per_process is not None:
        return _fixed(cores, processes, cores_per_process + workers)
    for key in (lambda core: (core.socket, core.node), lambda core: (core.socket, 0)):
        domains: dict[tuple[int, int], list[Core]] = {}
        for core in cores:
            domains.setdefault(key(core), []).append(core)
        if len(domains) > 1 and processes >= len(domains):
            counts = _seats(processes, [len(domain) for domain in domains.values()])
            if counts:
                shares = []
                for domain, count in zip(domains.values(), counts, strict=True):
                    shares += _split(domain, count)
                return shares
        if len(domains) > 1 and len(domains) % processes == 0:
            # Fewer processes than nodes: whole nodes each, next to one another, unless a cpuset cuts them unevenly.
            groups = list(domains.values())
            each = len(groups) // processes
            whole = [[core for group in groups[i * each : (i + 1) * each] for core in group] for i in range(processes)]
            if min(map(len, whole)) >= len(cores) // processes:
                return whole
    return _split(cores, processes)


def _fixed(cores: list[Core], processes: int, size: int) -> list[list[Core]]:
    """`size` cores for each, within one node while there is room."""
    left = list(cores)
    shares = []
    for _ in range(processes):
        by_node: dict[int, list[Core]] = {}
        for core in left:
            by_node.setdefault(core.node, []).append(core)
        share = next((node[:size] for node in by_node.values() if len(node) >= size), left[:size]) or cores[:size]
        shares.append(share)
        left = [core for core in left if core not in share]
    return shares


def _seats(processes: int, sizes: list[int]) -> list[int] | None:
    """How many processes each domain takes, in proportion to its cores; None if one would get none or too many."""
    total = sum(sizes)
    seats = [processes * size // total for size in sizes]
    rest = sorted(range(len(sizes)), key=lambda i: (processes * sizes[i]) % total, reverse=True)
    for i in rest[: processes - sum(seats)]:
        seats[i] += 1
    if any(count == 0 or count > size for count, size in zip(seats, sizes, strict=True)):
        return None
    # With unequal shares every step waits for the slowest process; equal shares across domains are better.
    smallest = min(size // count for size, count in zip(sizes, seats, strict=True))
    return seats if smallest >= total // processes else None


def _split(cores: list[Core], processes: int) -> list[list[Core]]:
    each = len(cores) // processes
    if each == 0:  # oversubscription was allowed
        return [[cores[rank % len(cores)]] for rank in range(processes)]
    return [cores[rank * each : (rank + 1) * each] for rank in range(processes)]


def _placement(
    rank: int, share: list[Core], machine: Machine, threads: int | None, workers: int, logical: bool, allowed: int
) -> Placement:
    computing, kept = (share[:-workers], share[-workers:]) if 0 < workers < len(share) else (share, [])
    places = computing if logical else [dataclasses.replace(core, cpus=core.cpus[:1]) for core in computing]
    cpus = [cpu for core in places for cpu in core.cpus]
    siblings = () if logical else tuple(sorted(cpu for core in computing for cpu in core.cpus[1:]))
    # Fewer threads than cores may move among them: if pinned to the first ones, two launches would share those.
    count = threads or min(len(cpus), allowed)
    worker_cpus = tuple(sorted(cpu for core in kept for cpu in core.cpus))
    nodes, count = _memory_nodes(machine, computing), max(count, 1)
    fits_one_node = count <= max(Counter(core.node for core in computing).values())
    spread = len(nodes) > 1 and not fits_one_node
    return Placement(rank, tuple(sorted(cpus)), worker_cpus, nodes, count, siblings, spread)


def _memory_nodes(machine: Machine, cores: list[Core]) -> tuple[int, ...]:
    """The nodes of these cores. Where one has no memory, or the cpuset does not allow its memory, the nearest that has."""
    allowed = machine.limits.memory_nodes
    usable = [node for node in machine.nodes if node.memory != 0 and (allowed is None or node.number in allowed)]
    if len(usable) < 2:
        return ()
    place = {node.number: i for i, node in enumerate(machine.nodes)}
    distances = {node.number: node.distances for node in machine.nodes}
    numbers = [node.number for node in usable]
    found = set()
    for home in {core.node for core in cores}:
        if home in numbers:
            found.add(home)
        elif len(distances.get(home, ())) == len(machine.nodes):
            found.add(min(numbers, key=lambda number: (distances[home][place[number]], number)))
        else:  # nobody knows which is near
            return ()
    return tuple(sorted(found))


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers)) or "unknown"
