"""`Machine`: everything that the other packages need to know about the computer, read in milliseconds, without torch."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
from dataclasses import dataclass
from typing import Any

from stoker.machine.cpuinfo import CpuModel, read_cpu_model, read_flags, read_processors
from stoker.machine.isa import InstructionSets, read_instruction_sets
from stoker.machine.limits import Limits, read_limits
from stoker.machine.topology import Cache, Core, Cpu, Node, meminfo, read_caches, read_cpus, read_nodes
from stoker.machine.tree import Tree

__all__ = ["Machine", "this_machine"]


@dataclass(frozen=True)
class Machine:
    """What a computer is, and what this process may use of it.

    None means unknown. CPUs are identified by their kernel numbers.
    """

    model: CpuModel
    isa: InstructionSets
    cpus: tuple[Cpu, ...]
    """The logical CPUs that are online."""
    nodes: tuple[Node, ...]
    caches: tuple[Cache, ...]
    memory_total: int | None
    """Bytes."""
    memory_available: int | None
    """Bytes that programs can still allocate without swapping, on the whole machine."""
    limits: Limits

    @classmethod
    def read(cls, root: str | os.PathLike[str] = "/") -> Machine:
        """Reads the machine whose /proc and /sys are below `root`. Never raises: what cannot be read is unknown."""
        tree = Tree(root)
        processors = read_processors(tree)
        model = read_cpu_model(tree, processors)
        nodes = read_nodes(tree, processors)
        cpus = read_cpus(tree, processors, nodes)
        memory = meminfo(tree)
        return cls(
            model=model,
            isa=read_instruction_sets(read_flags(processors), model.architecture),
            cpus=cpus,
            nodes=nodes,
            caches=read_caches(tree, cpus),
            memory_total=memory.get("MemTotal"),
            memory_available=memory.get("MemAvailable"),
            limits=read_limits(tree),
        )

    @functools.cached_property
    def cores(self) -> tuple[Core, ...]:
        """The physical cores."""
        by_core: dict[int, list[Cpu]] = {}
        for cpu in self.cpus:
            by_core.setdefault(cpu.core, []).append(cpu)
        return tuple(
            Core(number, cpus[0].socket, cpus[0].node, cpus[0].kind, tuple(cpu.number for cpu in cpus))
            for number, cpus in sorted(by_core.items())
        )

    @property
    def sockets(self) -> int:
        return len({cpu.socket for cpu in self.cpus})

    @property
    def threads_per_core(self) -> int:
        """Logical CPUs on the largest core: 2 with SMT."""
        return max((len(core.cpus) for core in self.cores), default=1)

    @property
    def hybrid(self) -> bool:
        return len({cpu.kind for cpu in self.cpus}) > 1

    @functools.cached_property
    def usable_cpus(self) -> tuple[int, ...]:
        """Logical CPUs that this process may run on: affinity mask and cpuset."""
        present = {cpu.number for cpu in self.cpus}
        usable = present
        for allowed in (self.limits.affinity, self.limits.cgroup.cpuset):
            if allowed and usable & set(allowed):
                usable = usable & set(allowed)
        return tuple(sorted(usable))

    @functools.cached_property
    def usable_cores(self) -> tuple[Core, ...]:
        """Physical cores of which this process may use at least one logical CPU, with those CPUs only."""
        usable = set(self.usable_cpus)
        cores = (
            dataclasses.replace(core, cpus=tuple(cpu for cpu in core.cpus if cpu in usable)) for core in self.cores
        )
        return tuple(core for core in cores if core.cpus)

    @property
    def quota(self) -> float | None:
        """CPUs' worth of time per second that the container allows; None without such a limit."""
        return self.limits.cgroup.quota

    @property
    def fast_cores(self) -> tuple[Core, ...]:
        """The usable cores to train on: the performance cores, unless this process has none."""
        fast = tuple(core for core in self.usable_cores if core.kind == "performance")
        return fast or self.usable_cores

    @property
    def usable_threads(self) -> int:
        """The best number of compute threads: one per fast core, within the quota."""
        threads = len(self.fast_cores)
        if self.quota is not None:
            threads = min(threads, int(self.quota))
        return max(threads, 1)

    @property
    def usable_memory(self) -> int | None:
        """Bytes that this process may use: the machine's memory or the container's limit."""
        known = [size for size in (self.memory_total, self.limits.cgroup.memory_limit) if size is not None]
        return min(known, default=None)

    @property
    def free_memory(self) -> int | None:
        """Bytes that this process can still allocate: what the machine has left, within the container's limit."""
        cgroup = self.limits.cgroup
        found = [self.memory_available]
        if cgroup.memory_limit is not None:
            found.append(max(cgroup.memory_limit - (cgroup.memory_used or 0), 0))
        return min((size for size in found if size is not None), default=None)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Equal for machines that share measurements: same CPU, same topology, same limits."""
        identity = {
            "model": dataclasses.asdict(self.model),
            "flags": sorted(self.isa.flags),
            "cores": [(core.socket, core.node, core.kind, len(core.cpus)) for core in self.usable_cores],
            "caches": sorted({(cache.level, cache.kind, cache.size or 0, len(cache.cpus)) for cache in self.caches}),
            "memory": (self.usable_memory or 0) >> 30,
            "quota": self.quota,
        }
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, Any]:
        """Facts and derived values, for JSON."""
        facts = dataclasses.asdict(self)
        facts["isa"]["flags"] = sorted(self.isa.flags)
        facts["isa"]["bf16_units"] = self.isa.bf16_units
        facts["cores"] = [dataclasses.asdict(core) for core in self.cores]
        facts["summary"] = {
            "sockets": self.sockets,
            "physical_cores": len(self.cores),
            "logical_cpus": len(self.cpus),
            "threads_per_core": self.threads_per_core,
            "performance_cores": sum(core.kind == "performance" for core in self.cores),
            "efficiency_cores": sum(core.kind == "efficiency" for core in self.cores),
            "hybrid": self.hybrid,
            "numa_nodes": len(self.nodes),
            "usable_cpus": list(self.usable_cpus),
            "usable_cores": len(self.usable_cores),
            "quota": self.quota,
            "usable_threads": self.usable_threads,
            "usable_memory": self.usable_memory,
            "fingerprint": self.fingerprint,
        }
        return facts


@functools.cache
def this_machine() -> Machine:
    """The machine this process runs on, read once."""
    return Machine.read()
