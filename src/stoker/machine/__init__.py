"""What this computer is: instruction sets, cores, NUMA nodes, limits, software and measured rates; no torch on import.

`Machine.read()` returns the facts. `measure` measures rates, `rates` stores them, `software` reads what is installed, `verdicts`
derives advice, and `doctor_page` shows all of it.
"""

from __future__ import annotations

from stoker.machine.cgroup import Cgroup
from stoker.machine.cpuinfo import CpuModel
from stoker.machine.facts import Machine, this_machine
from stoker.machine.isa import InstructionSets
from stoker.machine.limits import Limits, Ulimit
from stoker.machine.topology import Cache, Core, Cpu, Node

__all__ = [
    "Cache", "Cgroup", "Core", "Cpu", "CpuModel", "InstructionSets", "Limits", "Machine", "Node", "Ulimit", "this_machine",
]  # fmt: skip
