"""Which cores a task of Slurm may use: those that srun has pinned it to, or its part of a mask that the tasks of a node share.

Whether srun pins each task depends on the site's plugins, on srun's options (`--cpu-bind`, `--cpus-per-task`) and on the numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from stoker.launch.rank.environment import Rank
from stoker.launch.rank.rank_settings import Settings
from stoker.machine import Machine
from stoker.numbers import whole_number

__all__ = ["task_share"]


def task_share(
    settings: Settings, rank: Rank, machine: Machine, environment: Mapping[str, str]
) -> tuple[Settings, int, int]:
    """The settings, and which part of how many equal parts of this process's own mask it takes."""
    cpus = whole_number(environment.get("SLURM_CPUS_ON_NODE", ""))
    masks = set(filter(None, environment.get("SLURM_CPU_BIND_LIST", "").split(",")))
    is_own = len(masks) > 1 or (cpus is not None and len(machine.usable_cpus) * rank.local_size <= cpus)
    part, parts = (0, 1) if is_own else (rank.local_rank, rank.local_size)
    # Where neither a plugin nor a cgroup confines a job, its mask is the whole node, but it has only been given so many CPUs.
    if cpus is not None and settings.threads is None and "OMP_NUM_THREADS" not in environment:
        given = max(cpus // rank.local_size, 1)
        if given < len(machine.fast_cores) // parts:
            settings = replace(settings, threads=given)
    return settings, part, parts
