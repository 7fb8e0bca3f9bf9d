"""Several processes under torchrun's elastic agent (`stoker.launch.launchers.elastic`): on this machine, or on several on each
of which `stoker launch` is started.
"""

from __future__ import annotations

from collections.abc import Mapping

from stoker.errors import UserError
from stoker.launch.launch_plan import DEFAULT_PORT, Plan, counts, place_ranks, rank_command
from stoker.launch.launchers import elastic
from stoker.launch.launchers.elastic_job import Job, silence
from stoker.launch.options import Options
from stoker.launch.rank.rank_settings import Settings
from stoker.machine import Machine, network
from stoker.numbers import whole_number

__all__ = ["Torchrun"]


class Torchrun:
    name, stays = "torchrun", True

    def accepts(self, options: Options) -> bool:
        return counts(options)[0] > 1

    def plan(self, options: Options, settings: Settings, machine: Machine, environment: Mapping[str, str]) -> Plan:
        total, local, machines = counts(options)
        min_machines = options.min_machines or machines
        address, port, rank = "127.0.0.1", options.main_process_port, 0
        if machines > 1:
            address, port = _endpoint(options, machines, environment)
            rank = options.machine_rank or 0
            if options.machine_rank is None and not network.is_local(address):
                rank = -1
            elif rank >= machines:
                raise UserError(f"--machine_rank {rank}: there are {machines} machines, numbered 0 to {machines - 1}")
        ranks = place_ranks(local, settings, machine, environment, first=abs(rank) * local)
        return Plan(
            launcher=self.name, program="torchrun's elastic agent", settings=settings, ranks=ranks, size=total,
            machines=machines, min_machines=min_machines, machine_rank=rank, address=address, port=port,
        )  # fmt: skip

    def command(self, plan: Plan, options: Options, environment: Mapping[str, str]) -> list[str]:
        return rank_command(plan, options)[0]

    def run(self, plan: Plan, options: Options) -> int:
        job = Job(
            local_size=len(plan.ranks),
            machines=plan.machines,
            least=plan.min_machines,
            machine_rank=plan.machine_rank,
            address=plan.address,
            port=plan.port,
            max_restarts=options.allowed_restarts,
            wait=options.rdzv_timeout,
            silence=silence(),
            waits_for_lost=options.heal,
        )
        return elastic.launch(job, plan.settings, options.script, options.arguments)


def _endpoint(options: Options, machines: int, environment: Mapping[str, str]) -> tuple[str, int]:
    address, port = options.main_process_ip or environment.get("MASTER_ADDR"), options.main_process_port
    if not address:
        raise UserError(
            f"{machines} machines need --main_process_ip, the address of machine 0 (this machine's is {network.own_address()}), "
            "or a hostfile for mpirun (-f)"
        )
    if port is None:
        port = whole_number(environment.get("MASTER_PORT", ""))
    return address, DEFAULT_PORT if port is None else port
