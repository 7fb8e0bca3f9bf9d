"""How many processes a machine should train with, and how many threads in each: a cost model over its cores and NUMA nodes.

Candidates are one process per NUMA node, one per group of neighbouring nodes (a socket among them), and one on everything. All
train the same batch. A process that spans nodes has its memory spread over them (`stoker.launch.placement.binding`) and reads
part of it from farther away; each further process reads, updates and exchanges all weights once more. Threads are not judged:
every candidate has the same tokens per thread.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from stoker.machine.facts import Machine

__all__ = ["REFERENCE", "Division", "Reference", "best_division", "divisions", "processes_and_threads"]


@dataclass(frozen=True)
class Reference:
    """The step that is compared: BERT-base for questions, all weights, 12 rows of SQuAD for each NUMA node with cores."""

    # From stoker.hf.step_cost, which tests/plan compares them with.
    tokens: float = 2052
    """Per node."""
    flops: float = 5.1e8 / 0.92
    """Per token, at the share of the peak that products reach."""
    moved_per_token: float = 3.98e6
    moved_per_process: float = 60 * 108.9e6
    """Bytes: weights, gradients and optimizer states are read, packed and updated by each process."""
    exchanged: float = 12 * 108.9e6
    """Bytes that each of several processes moves to sum the gradients in shared memory."""


REFERENCE = Reference()

# Typical rates; only their ratio matters.
_CORE = 60e9
_SOCKET = 200e9
_TIE = 1.01
"""Up to this ratio two divisions are equal: the one with fewer nodes in each process is taken."""


@dataclass(frozen=True)
class Division:
    """One way to divide a machine."""

    processes: int
    threads: int
    """Of each process."""
    nodes: int
    """NUMA nodes that each process uses."""
    seconds: float
    """Of the model's step."""


def best_division(machine: Machine, only: Collection[int] | None = None) -> Division:
    """The fastest division; `only`: of these NUMA nodes."""
    found = divisions(machine, only)
    fastest = min(division.seconds for division in found)
    return min((one for one in found if one.seconds <= _TIE * fastest), key=lambda one: (one.nodes, one.seconds))


def processes_and_threads(machine: Machine) -> tuple[int, int]:
    """The number of processes, and of threads in each: one thread per fast core, within the quota."""
    best = best_division(machine)
    return best.processes, best.threads


def divisions(machine: Machine, only: Collection[int] | None = None) -> tuple[Division, ...]:
    """The candidates for a machine, fewest processes first."""
    per_node: dict[int, int] = {}
    socket_of: dict[int, int] = {}
    for core in (core for core in machine.fast_cores if only is None or core.node in only):
        per_node[core.node] = per_node.get(core.node, 0) + 1
        socket_of[core.node] = core.socket
    total = min(machine.usable_threads, max(sum(per_node.values()), 1))
    nodes = sorted(per_node, key=lambda node: (socket_of[node], node))
    found = {(1, total): _division(machine, [nodes], total, len(nodes), socket_of)} if nodes else {}
    for size in (size for size in range(1, len(nodes)) if len(nodes) % size == 0):
        groups = [nodes[i : i + size] for i in range(0, len(nodes), size)]
        counts = [sum(per_node[node] for node in group) for group in groups]
        # As many threads as the smallest group has cores; where a cpuset cuts nodes unevenly, larger groups take more processes.
        shares = [group for group, count in zip(groups, counts, strict=True) for _ in range(count // min(counts))]
        # If the quota is less than all cores: as few processes as needed, each within its nodes.
        shares = shares[: -(-total // min(counts))]
        threads = min(min(counts), total // len(shares))
        division = _division(machine, shares, threads, len(nodes), socket_of)
        found.setdefault((division.processes, threads), division)
    return tuple(sorted(found.values(), key=lambda one: one.processes)) or (Division(1, total, 1, 0.0),)


def _division(
    machine: Machine, shares: Sequence[Sequence[int]], threads: int, all_nodes: int, socket_of: dict[int, int]
) -> Division:
    processes, tokens = len(shares), REFERENCE.tokens * all_nodes
    used = {node for share in shares for node in share}
    bandwidth = _SOCKET * len({socket_of[node] for node in used}) * len(used) / max(all_nodes, 1)
    per_process = REFERENCE.moved_per_process + (REFERENCE.exchanged if processes > 1 else 0)
    moved = tokens * REFERENCE.moved_per_token + processes * per_process
    distance = max(_distance(machine, share) for share in shares)
    seconds = tokens * REFERENCE.flops / (processes * threads * _CORE) + moved * distance / bandwidth
    return Division(processes, threads, max(len(share) for share in shares), seconds)


def _distance(machine: Machine, share: Sequence[int]) -> float:
    """How much longer memory takes for cores of these nodes, if they use the memory of all of them alike; 1 is local."""
    place = {node.number: i for i, node in enumerate(machine.nodes)}
    distances = {node.number: node.distances for node in machine.nodes}
    found = [
        distances[a][place[b]] / 10 if place[b] < len(distances[a]) else 1.0
        for a in share
        for b in share
        if a in place and b in place
    ]
    return sum(found) / len(found) if found else 1.0
