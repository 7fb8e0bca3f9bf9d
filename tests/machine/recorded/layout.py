"""Lays out the /proc and /sys of a described machine, in the kernel's own formats.

A copy of the real trees would be thousands of files per machine that nobody reads. What is kept instead is what differs
between machines; the formats, which are the kernel's, are written here once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class CacheShape:
    level: int
    kind: str
    """Data, Instruction or Unified, as sysfs writes it."""
    size: str
    shared: Callable[[int], tuple[int, ...]]
    """CPU -> the CPUs that share the cache with it."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One machine. The functions say, for a CPU number, where it sits."""

    cpus: int
    cpuinfo: dict[str, str]
    """The lines of /proc/cpuinfo that are the same for each CPU."""
    socket: Callable[[int], int] = lambda cpu: 0
    core_id: Callable[[int], int] = lambda cpu: cpu
    siblings: Callable[[int], tuple[int, ...]] = lambda cpu: (cpu,)
    nodes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    node_memory_kb: int = 0
    other_memory_kb: dict[int, int] = field(default_factory=dict)
    """Of nodes whose memory differs from `node_memory_kb`."""
    distances: Callable[[int, int], int] = lambda a, b: 10 if a == b else 21
    caches: tuple[CacheShape, ...] = ()
    memory_kb: int = 0
    allowed: str | None = None
    """Cpus_allowed_list; all CPUs without it."""
    memory_nodes: str | None = None
    """Mems_allowed_list; all nodes without it."""
    files: dict[str, str] = field(default_factory=dict)
    """Anything else, by absolute path."""


def kernel_list(cpus: tuple[int, ...]) -> str:
    """(0, 1, 2, 5) -> 0-2,5."""
    text, start = [], None
    for i, cpu in enumerate(cpus):
        start = cpu if start is None else start
        if i + 1 == len(cpus) or cpus[i + 1] != cpu + 1:
            text.append(f"{start}-{cpu}" if start != cpu else f"{cpu}")
            start = None
    return ",".join(text)


def lay_out(shape: Shape, root: Path) -> Path:
    everything = tuple(range(shape.cpus))
    write(root, "/proc/cpuinfo", "\n".join(_paragraph(shape, cpu) for cpu in everything))
    write(root, "/proc/meminfo", _meminfo(shape.memory_kb))
    cpus, memory = (
        shape.allowed or kernel_list(everything),
        shape.memory_nodes or kernel_list(tuple(shape.nodes or (0,))),
    )
    write(root, "/proc/self/status", f"Name:\tpython3\nCpus_allowed_list:\t{cpus}\nMems_allowed_list:\t{memory}\n")
    write(root, "/proc/self/limits", _LIMITS)
    write(root, "/sys/devices/system/cpu/online", kernel_list(everything) + "\n")
    write(root, "/sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n")
    for cpu in everything:
        _lay_out_cpu(shape, cpu, root)
    for node, cpus in shape.nodes.items():
        where = f"/sys/devices/system/node/node{node}"
        write(root, f"{where}/cpulist", kernel_list(cpus) + "\n")
        distances = " ".join(str(shape.distances(node, other)) for other in shape.nodes)
        write(root, f"{where}/distance", distances + "\n")
        total = shape.other_memory_kb.get(node, shape.node_memory_kb)
        free = max(total - 4096, 0)
        lines = (f"Node {node} MemTotal:       {total} kB", f"Node {node} MemFree:        {free} kB")
        write(root, f"{where}/meminfo", "\n".join(lines) + "\n")
    for path, text in shape.files.items():
        write(root, path, text)
    return root


def write(root: Path, path: str, text: str) -> None:
    target = root / path.lstrip("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)


def _paragraph(shape: Shape, cpu: int) -> str:
    lines = [f"processor\t: {cpu}"]
    lines += [f"{key}\t: {value}" for key, value in shape.cpuinfo.items()]
    if "vendor_id" in shape.cpuinfo:
        lines += [f"physical id\t: {shape.socket(cpu)}", f"core id\t\t: {shape.core_id(cpu)}"]
    return "\n".join(lines) + "\n"


def _lay_out_cpu(shape: Shape, cpu: int, root: Path) -> None:
    where = f"/sys/devices/system/cpu/cpu{cpu}"
    write(root, f"{where}/topology/physical_package_id", f"{shape.socket(cpu)}\n")
    write(root, f"{where}/topology/core_id", f"{shape.core_id(cpu)}\n")
    write(root, f"{where}/topology/thread_siblings_list", kernel_list(shape.siblings(cpu)) + "\n")
    for index, cache in enumerate(shape.caches):
        write(root, f"{where}/cache/index{index}/level", f"{cache.level}\n")
        write(root, f"{where}/cache/index{index}/type", f"{cache.kind}\n")
        write(root, f"{where}/cache/index{index}/size", f"{cache.size}\n")
        write(root, f"{where}/cache/index{index}/shared_cpu_list", kernel_list(cache.shared(cpu)) + "\n")


def _meminfo(kilobytes: int) -> str:
    free = kilobytes * 9 // 10
    return f"MemTotal:       {kilobytes} kB\nMemFree:        {free} kB\nMemAvailable:   {free} kB\nBuffers:            6144 kB\n"


_LIMITS = """\
Limit                     Soft Limit           Hard Limit           Units
Max cpu time              unlimited            unlimited            seconds
Max file size             unlimited            unlimited            bytes
Max data size             unlimited            unlimited            bytes
Max stack size            8388608              unlimited            bytes
Max core file size        0                    unlimited            bytes
Max resident set          unlimited            unlimited            bytes
Max processes             2062019              2062019              processes
Max open files            1048576              1048576              files
Max locked memory         67108864             67108864             bytes
Max address space         unlimited            unlimited            bytes
Max file locks            unlimited            unlimited            locks
"""
