"""Which cores, which memory and how many threads each process of a host gets: pure functions of `Machine`.

Whole physical cores are divided over the processes; a process stays inside one NUMA node, or at least one socket,
wherever the numbers allow. Setting it is the child's business (`stoker.launch.placement.binding`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from stoker.english import counted
from stoker.errors import UserError
from stoker.machine import Core, Machine
from stoker.numbers import whole_number

__all__ = ["Placement", "parse_nodes", "place"]

_LAST_NODE = 1023  # Linux is built for at most 2^10


@dataclass(frozen=True)
class Placement:
    """The share of a host that one process gets."""

    local_rank: int
    cpus: tuple[int, ...]
    """Logical CPUs for computing; the affinity mask is these and the workers'."""
    worker_cpus: tuple[int, ...]
    """Logical CPUs left for communication workers."""
    nodes: tuple[int, ...]
    """NUMA nodes its cores lie in; memory is bound to them. Empty: nothing to bind."""
    threads: int


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


def parse_nodes(text: str) -> tuple[int, ...]:
    """`0,2-3` as ipexrun's --nodes-list takes it."""
    found: list[int] = []
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        first, dash, last = part.partition("-")
        begin, end = whole_number(first), whole_number(last if dash else first)
        if begin is None or end is None or not 0 <= begin <= end:
            raise UserError(f"--nodes-list {text!r}: {part!r} is neither a number nor a range such as 0-3")
        if end > _LAST_NODE:
            raise UserError(f"--nodes-list {text!r}: no machine has more than {_LAST_NODE + 1:,} NUMA nodes")
        found += range(begin, end + 1)
    if not found:
        raise UserError(f"--nodes-list {text!r} names no NUMA node; write numbers and ranges, such as 0,2-3")
    return tuple(dict.fromkeys(found))


def _candidates(machine: Machine, efficiency: bool, nodes: Sequence[int] | None) -> list[Core]:
    cores = list(machine.usable_cores if efficiency else machine.fast_cores)
    if nodes is not None:
        present = {core.node for core in cores}
        for node in nodes:
            if node not in present:
                raise UserError(
                    f"--nodes-list names NUMA node {node}; this machine's usable nodes are {_listed(sorted(present))}"
                )
        cores = [core for core in cores if core.node in nodes]
    # Neighbours share caches; nodes and sockets stay together.
    return sorted(cores, key=lambda core: (core.socket, core.node, core.number))


def _budget(machine: Machine, cores: list[Core], logical: bool) -> int:
    """Threads that can run at once: the cores, or what the container's quota allows of them."""
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
    raise UserError(
        f"{counted(processes, 'process')} of {counted(computing, 'thread')}{kept}{each} "
        f"need{'s' * (processes == 1)} {processes * wanted} {kind}; this machine has {places} for them{quota}. "
        f"Ask for {fewer}{' or cores for communication' if workers else ''}, or allow sharing with --oversubscribe"
    )


def _shares(cores: list[Core], processes: int, cores_per_process: int | None, workers: int) -> list[list[Core]]:
    """The cores of each process: divided by node where the processes fit evenly, else by socket, else in a row."""
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
            # Fewer processes than nodes: whole nodes each, next to one another.
            groups = list(domains.values())
            each = len(groups) // processes
            return [[core for group in groups[i * each : (i + 1) * each] for core in group] for i in range(processes)]
    return _split(cores, processes)


def _fixed(cores: list[Core], processes: int, size: int) -> list[list[Core]]:
    """`size` cores for each, kept within a node while one has room for them."""
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
    # Unequal shares make every step wait for the slowest process; then a row of equal ones is better.
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
    # Fewer threads than cores stay free to move among them: pinned to the first ones, two launches would share those.
    count = threads or min(len(cpus), allowed)
    several_nodes = len([node for node in machine.nodes if node.memory != 0]) > 1
    nodes = tuple(sorted({core.node for core in computing})) if several_nodes else ()
    return Placement(
        rank, tuple(sorted(cpus)), tuple(sorted(c for core in kept for c in core.cpus)), nodes, max(count, 1)
    )


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers)) or "unknown"
