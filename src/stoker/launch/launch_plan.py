"""What will run where: a `Plan`, which a launcher makes before anything is started and `--dry-run` prints."""

from __future__ import annotations

import shlex
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from stoker.english import counted
from stoker.errors import UserError
from stoker.hf.secrets import HIDDEN, is_secret, without_secrets
from stoker.launch.options import AUTOMATIC, Options
from stoker.launch.placement import binding
from stoker.launch.placement.divide_cores import Placement
from stoker.launch.placement.hostfile import Host
from stoker.launch.rank import handover
from stoker.launch.rank.rank_settings import Settings
from stoker.machine import Machine
from stoker.machine.tree import format_cpu_list

if TYPE_CHECKING:
    from stoker.launch.launchers.mpi import Mpirun

__all__ = [
    "DEFAULT_PORT",
    "Launcher",
    "Plan",
    "PlannedRank",
    "check_is_number",
    "check_size",
    "counts",
    "place_ranks",
    "show",
]

DEFAULT_PORT = 29500
_MOST, _MOST_LOCAL = 65536, 4096


@dataclass(frozen=True)
class PlannedRank:
    rank: int
    host: str
    local_rank: int
    placement: Placement | None
    """None: decided on that host, or nothing is pinned."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    launcher: str
    """The name of the launcher: single, torchrun, mpirun or slurm."""
    program: str
    """What starts the ranks, for people."""
    settings: Settings
    ranks: tuple[PlannedRank, ...]
    """On this machine; with a hostfile or Slurm, on all machines."""
    size: int
    machines: int = 1
    min_machines: int = 1
    """Machines without which the job cannot continue; fewer than `machines` after `--nnodes 1:2`."""
    machine_rank: int = 0
    """-1: any but the first; machine 0 assigns the number."""
    address: str = "127.0.0.1"
    port: int | None = None
    mpirun: Mpirun | None = None
    host_counts: tuple[tuple[Host, int], ...] = ()
    """Processes of each host under mpirun."""
    has_hostfile: bool = False
    notes: tuple[str, ...] = ()


class Launcher(Protocol):
    """A way to start ranks. The first of `stoker.launch.start.LAUNCHERS` that accepts the options is used."""

    name: str
    stays: bool
    """Whether this process waits for the ranks; otherwise `run` replaces it and does not return."""

    def accepts(self, options: Options) -> bool: ...

    def plan(self, options: Options, settings: Settings, machine: Machine, environment: Mapping[str, str]) -> Plan: ...

    def command(self, plan: Plan, options: Options, environment: Mapping[str, str]) -> list[str]:
        """What `--dry-run` shows."""
        ...

    def run(self, plan: Plan, options: Options) -> int:
        """Starts the ranks and waits for them; returns the exit code."""
        ...


def counts(options: Options) -> tuple[int, int, int]:
    """Processes in all, on each machine, and machines."""
    machines = options.num_machines or 1
    total = options.num_processes
    check_is_number(options)
    if total == -1:
        raise UserError(
            "num_processes is -1 in the config file, which leaves it to the command line; add --num_processes N"
        )
    if total is None:
        total = machines * (options.per_machine or 1)
    if total % machines:
        raise UserError(
            f"{total} processes cannot be divided evenly over {machines} machines; use a multiple of {machines}, or a hostfile "
            "with slots"
        )
    local = total // machines
    if options.per_machine not in (None, local):
        raise UserError(
            f"{total} processes on {machines} machines are {local} on each, but -ppn is {options.per_machine}; "
            "leave one of them out"
        )
    check_size(total, local)
    return total, local, machines


def check_is_number(options: Options) -> None:
    if options.per_machine == AUTOMATIC:
        raise UserError(
            "-ppn auto needs to see the machine that runs the processes; with a hostfile, --launcher slurm or --emit, give a "
            "number (`stoker doctor` on that machine suggests one)"
        )


def check_size(total: int, local: int) -> None:
    """Refuses numbers so large that the plan itself would exhaust the memory, as after a typing error."""
    if total > _MOST or local > _MOST_LOCAL:
        raise UserError(
            f"{total:,} processes, {local:,} on each machine, are too many; the most is {_MOST:,}, and {_MOST_LOCAL:,} on each"
        )


def place_ranks(
    count: int, settings: Settings, machine: Machine, environment: Mapping[str, str], *, first: int = 0, host: str = ""
) -> tuple[PlannedRank, ...]:
    """The ranks of this machine. They are placed before anything starts, so that what does not fit is reported once."""
    shares, _ = binding.choose_all(settings, machine, count, environment)
    host = host or socket.gethostname()
    return tuple(PlannedRank(first + local, host, local, shares[local] if shares else None) for local in range(count))


def show(plan: Plan, options: Options, command: Sequence[str]) -> str:
    """What `--dry-run` prints."""
    least = f"{plan.min_machines} to " if plan.min_machines < plan.machines else ""
    processes, machines = counted(plan.size, "process"), f"{least}{counted(plan.machines, 'machine')}"
    lines = [f"launcher: {plan.program}; {processes} on {machines}", *(f"note: {note}" for note in plan.notes)]
    for planned in plan.ranks:
        lines.append(f"rank {planned.rank} on {planned.host}")
        lines += _show_placement(planned.placement, plan.settings)
        given = {name: HIDDEN if is_secret(name) else value for name, value in plan.settings.genv}
        variables = {**_variables(plan, planned), **given}
        lines.append("  environment  " + " ".join(f"{key}={shlex.quote(value)}" for key, value in variables.items()))
    if handover.FLAG in command:
        arguments = without_secrets(options.arguments)
        lines.append("handed over by the environment: " + shlex.join([options.script, *arguments]))
    return "\n".join([*lines, "command: " + shlex.join(command)])


def _show_placement(share: Placement | None, settings: Settings) -> list[str]:
    if share is None:
        return ["  cores    decided there" if settings.bind != "none" else "  cores    not pinned"]
    workers = [f"  workers  {format_cpu_list(share.worker_cpus)}"] if share.worker_cpus else []
    # Also empty where a cpuset allows the memory of one node only.
    memory = f"node {format_cpu_list(share.nodes)}" if share.nodes else "not bound (one NUMA node)"
    siblings = [f"  ccl      {format_cpu_list(share.siblings)}"] if share.siblings and not share.worker_cpus else []
    return [
        f"  cores    {format_cpu_list(share.cpus)}",
        *workers,
        *siblings,
        f"  memory   {memory}{', spread evenly' * share.spread}",
        f"  threads  {share.threads}",
    ]


def _variables(plan: Plan, planned: PlannedRank) -> dict[str, str]:
    """The variables of a rank, as far as they are known beforehand."""
    found = plan.settings.variables()
    if planned.placement is not None:
        found |= binding.thread_variables(planned.placement)
    if plan.size > 1:
        found |= {
            "RANK": str(planned.rank),
            "WORLD_SIZE": str(plan.size),
            "LOCAL_RANK": str(planned.local_rank),
            "PMI_RANK": str(planned.rank),
            "PMI_SIZE": str(plan.size),
            "MPI_LOCALRANKID": str(planned.local_rank),
            "MASTER_ADDR": plan.address,
            "MASTER_PORT": str(plan.port) if plan.port else "(a free one)",
        }
    return found


def rank_command(plan: Plan, options: Options) -> tuple[list[str], dict[str, str]]:
    """The command of a rank that this machine starts, and the variables it needs."""
    return handover.rank_command(plan.settings, options.script, options.arguments)


def handed_over(plan: Plan, options: Options) -> dict[str, str]:
    """The variables by which the ranks of mpirun and srun get what others have on the command line."""
    return handover.variables([plan.settings.to_json(), options.script, *options.arguments])
