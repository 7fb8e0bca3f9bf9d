"""One process on this machine: this process becomes the rank."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from stoker.launch.launch_plan import Plan, place_ranks, rank_command
from stoker.launch.options import Options
from stoker.launch.rank.rank_settings import Settings
from stoker.machine import Machine

__all__ = ["Single", "become"]


class Single:
    name, stays = "single", False

    def accepts(self, options: Options) -> bool:
        return True

    def plan(self, options: Options, settings: Settings, machine: Machine, environment: Mapping[str, str]) -> Plan:
        ranks = place_ranks(1, settings, machine, environment)
        return Plan(launcher=self.name, program="this process", settings=settings, ranks=ranks, size=1)

    def command(self, plan: Plan, options: Options, environment: Mapping[str, str]) -> list[str]:
        return rank_command(plan, options)[0]

    def run(self, plan: Plan, options: Options) -> int:
        return become(*rank_command(plan, options))


def become(command: list[str], variables: Mapping[str, str]) -> int:
    """Replaces this process: same pid, same parent, no fork. Does not return."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command[0], command, {**os.environ, **variables})
