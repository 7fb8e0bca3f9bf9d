"""What `stoker bench` found: kept while it measures, written as JSON, and read by the table and the plot."""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from stoker.bench.sides import Measured
from stoker.machine import Machine
from stoker.machine.load import Load

__all__ = ["FORMAT", "Allreduce", "Disturbance", "HostTime", "Pair", "Results", "machine_lines"]

FORMAT = 1
"""Of the JSON file; raised when a field changes its meaning."""


@dataclass
class Disturbance:
    """What else used the CPUs during a measurement; None where the system does not say."""

    others: float | None = None
    """CPUs that other programs kept busy."""
    stolen: float | None = None
    """CPUs that the hypervisor gave to other virtual machines."""
    cpus: int = 0

    @classmethod
    def of(cls, load: Load | None) -> Disturbance:
        return cls() if load is None else cls(round(load.busy, 2), round(load.stolen, 2), load.cpus)

    @property
    def disturbs(self) -> bool:
        """From half a CPU, or a twentieth of them, all threads of a step wait for those that were held up."""
        return max(self.others or 0.0, self.stolen or 0.0) > max(0.5, 0.05 * self.cpus)


@dataclass
class Pair:
    """Stock and Stoker, steps taken in turn."""

    case: str
    title: str
    precision: str
    """Of Stoker's side: fp32 or bf16."""
    rival: str
    """The stock side: "stock", or "stock bf16"."""
    threads: int
    layers: str = ""
    """How many of the model's layers there are, if not all."""
    stock: Measured = field(default_factory=Measured)
    stoker: Measured = field(default_factory=Measured)
    disturbance: Disturbance = field(default_factory=Disturbance)

    @property
    def measured(self) -> bool:
        return bool(self.stock.seconds and self.stoker.seconds)

    @property
    def faster(self) -> float:
        """How many times as fast Stoker is."""
        return self.stoker.faster_than(self.stock)

    @property
    def memory(self) -> float:
        """Stoker's peak memory as a share of stock's."""
        return self.stoker.peak_bytes / self.stock.peak_bytes if self.stock.peak_bytes else math.nan

    def to_dict(self) -> dict[str, Any]:
        return {
            "case": self.case,
            "title": self.title,
            "layers": self.layers,
            "precision": self.precision,
            "rival": self.rival,
            "threads": self.threads,
            "faster": round(self.faster, 3),
            "memory": round(self.memory, 3),
            "stock": _figures(self.stock),
            "stoker": _figures(self.stoker),
            "disturbed": self.disturbance.disturbs,
            **asdict(self.disturbance),
        }


def _figures(measured: Measured) -> dict[str, Any]:
    found = measured.to_dict()
    del found["note"]
    for name in ("seconds", "losses"):
        found[name] = [round(value, 6) if math.isfinite(value) else None for value in found[name]]
    return found


@dataclass
class HostTime:
    """CPU seconds per step of narrow models, whose arithmetic takes no time."""

    title: str
    seconds: dict[str, list[float]] = field(default_factory=dict)
    """By kind of side."""
    disturbance: Disturbance = field(default_factory=Disturbance)

    @property
    def medians(self) -> dict[str, float]:
        return {kind: statistics.median(values) for kind, values in self.seconds.items() if values}

    def share(self, precision: str = "") -> float:
        """Stoker's host time as a share of stock's, in fp32 or in "bf16"."""
        stock, stoker = f"stock {precision}".strip(), f"stoker {precision}".strip()
        return statistics.median(
            mine / theirs for mine, theirs in zip(self.seconds[stoker], self.seconds[stock], strict=True)
        )

    def to_dict(self) -> dict[str, Any]:
        found = {"title": self.title, "median_seconds": self.medians, "stoker_to_stock": round(self.share(), 3)}
        return {**found, "disturbed": self.disturbance.disturbs, **asdict(self.disturbance)}


@dataclass
class Allreduce:
    ranks: int
    placement: str
    """One rank per NUMA node, or both on one."""
    bytes: int
    seconds: dict[str, float]
    """Medians of gloo and ccl."""
    repeats: int
    disturbance: Disturbance = field(default_factory=Disturbance)

    @property
    def faster(self) -> float:
        return self.seconds["gloo"] / self.seconds["ccl"]

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "faster": round(self.faster, 3), "disturbed": self.disturbance.disturbs}


@dataclass
class Results:
    machine: Machine
    versions: dict[str, str]
    quick: bool = False
    interrupted: bool = False
    seconds: float = 0.0
    measured: str = field(default_factory=lambda: time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))
    facts: dict[str, Any] = field(default_factory=dict)
    """What torch can do on this machine."""
    steps: list[Pair] = field(default_factory=list)
    host: list[HostTime] = field(default_factory=list)
    sweep: list[Pair] = field(default_factory=list)
    """BERT-base QA by number of threads."""
    allreduce: list[Allreduce] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What was left out and why, what differs from the usual."""
    log: str = ""
    """What the processes wrote to standard error, if one failed."""

    @property
    def empty(self) -> bool:
        return not (self.measured_steps or self.host or self.measured_sweep or self.allreduce)

    @property
    def measured_steps(self) -> list[Pair]:
        return [pair for pair in self.steps if pair.measured]

    @property
    def measured_sweep(self) -> list[Pair]:
        return sorted((pair for pair in self.sweep if pair.measured), key=lambda pair: pair.threads)

    @property
    def disturbed(self) -> list[Disturbance]:
        everything: list[Pair | HostTime | Allreduce] = [
            *self.measured_steps,
            *self.host,
            *self.measured_sweep,
            *self.allreduce,
        ]
        return [one.disturbance for one in everything if one.disturbance.disturbs]

    def to_dict(self) -> dict[str, Any]:
        """For JSON; without names of hosts, users or folders, because people send it."""
        machine = self.machine
        return {
            "format": FORMAT,
            "measured": self.measured,
            "quick": self.quick,
            "interrupted": self.interrupted,
            "seconds": round(self.seconds, 1),
            "machine": {
                "lines": machine_lines(machine, self.versions),
                "cpu": asdict(machine.model),
                "instruction_sets": list(machine.isa.present),
                "sockets": machine.sockets,
                "cores": len(machine.cores),
                "logical_cpus": len(machine.cpus),
                "numa_nodes": len([node for node in machine.nodes if node.cpus]),
                "usable_cores": len(machine.usable_cores),
                "threads": machine.usable_threads,
                "quota": machine.quota,
                "memory_bytes": machine.memory_total,
                "usable_memory_bytes": machine.usable_memory,
            },
            "versions": self.versions,
            "facts": self.facts,
            "steps": [pair.to_dict() for pair in self.measured_steps],
            "host_time": [one.to_dict() for one in self.host],
            "threads": [pair.to_dict() for pair in self.measured_sweep],
            "allreduce": [one.to_dict() for one in self.allreduce],
            "notes": self.notes,
        }


_SHOWN_SETS = ("AVX2", "AVX512-F", "AVX512-BF16", "AMX-BF16", "NEON", "SVE", "BF16")


def machine_lines(machine: Machine, versions: dict[str, str]) -> list[str]:
    """The machine in three lines."""
    from stoker.english import counted
    from stoker.machine.doctor_page import gigabytes

    model = machine.model
    name = model.name or model.architecture or "unknown CPU"
    about = [f"{model.nominal_ghz:.2f} GHz nominal"] if model.nominal_ghz else []
    about += ["virtual machine"] if model.virtual else []
    about += [] if model.family is None else [f"family {model.family} model {model.model}"]
    cores = f"{counted(machine.sockets, 'socket')}, {counted(len(machine.cores), 'core')}"
    if machine.threads_per_core > 1:
        cores += f" with {machine.threads_per_core} threads each"
    if machine.usable_threads < len(machine.cores):
        cores += f", {machine.usable_threads} usable"
    nodes = counted(len([node for node in machine.nodes if node.cpus]) or 1, "NUMA node")
    sets = " ".join(name for name in machine.isa.present if name in _SHOWN_SETS)
    software = ", ".join(f"{package} {version}" for package, version in versions.items())
    return [
        ", ".join([name, *about]),
        f"{cores}, {nodes}, {gigabytes(machine.usable_memory)}, {sets or 'no vector units known'}",
        software,
    ]
