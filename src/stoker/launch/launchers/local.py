"""One process on this machine: this process becomes the rank."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from stoker.english import counted
from stoker.launch.launch_plan import Plan, PlannedRank, place_ranks, rank_command
from stoker.launch.options import Options
from stoker.launch.rank.rank_settings import Settings
from stoker.machine import Machine
from stoker.machine.processes import best_division

__all__ = ["Single", "become"]


class Single:
    name, stays = "single", False

    def accepts(self, options: Options) -> bool:
        return True

    def plan(self, options: Options, settings: Settings, machine: Machine, environment: Mapping[str, str]) -> Plan:
        ranks = place_ranks(1, settings, machine, environment)
        notes = () if options.num_processes or options.per_machine else _suggest_processes(ranks, machine, settings)
        return Plan(launcher=self.name, program="this process", settings=settings, ranks=ranks, size=1, notes=notes)

    def command(self, plan: Plan, options: Options, environment: Mapping[str, str]) -> list[str]:
        return rank_command(plan, options)[0]

    def run(self, plan: Plan, options: Options) -> int:
        return become(*rank_command(plan, options))


def _suggest_processes(ranks: Sequence[PlannedRank], machine: Machine, settings: Settings) -> tuple[str, ...]:
    """How many processes are not started by default: each takes a batch of its own, and the script must be made for several."""
    placement, best = ranks[0].placement, best_division(machine, settings.nodes)
    if (
        placement is None
        or len(placement.nodes) < 2
        or best.processes < 2
        or placement.threads < best.processes * best.threads
    ):
        return ()
    return (
        f"one process uses {counted(len(placement.nodes), 'NUMA node')}; `-ppn auto` starts {best.processes} with "
        f"{counted(best.threads, 'thread')} each, which is faster for a script that trains in several processes (each takes "
        "its own batch)",
    )


def become(command: list[str], variables: Mapping[str, str]) -> int:
    """Replaces this process: same pid, same parent, no fork. Does not return."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command[0], command, {**os.environ, **variables})
