"""Several processes under an mpirun that Stoker starts, on this machine or on the hosts of a hostfile."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Mapping
from dataclasses import replace

from stoker.errors import UserError
from stoker.launch.launch_plan import (
    DEFAULT_PORT,
    Plan,
    PlannedRank,
    check_is_number,
    check_size,
    counts,
    handed_over,
    place_ranks,
)
from stoker.launch.launchers import mpi, remote_hosts
from stoker.launch.options import Options
from stoker.launch.placement import hostfile
from stoker.launch.placement.hostfile import Host
from stoker.launch.rank import handover
from stoker.launch.rank.rank_settings import Settings
from stoker.machine import Machine, network

__all__ = ["MpirunLauncher"]


class MpirunLauncher:
    name, stays = "mpirun", True

    def accepts(self, options: Options) -> bool:
        return bool(options.hostfile) or (options.launcher in mpi.KINDS and (options.num_machines or 1) == 1)

    def plan(self, options: Options, settings: Settings, machine: Machine, environment: Mapping[str, str]) -> Plan:
        if options.hostfile:
            return _plan_hosts(options, options.hostfile, settings, machine, environment)
        total = counts(options)[0]
        ranks = place_ranks(total, settings, machine, environment)
        mpirun = mpi.find(options.launcher or "auto")
        return Plan(
            launcher=self.name, program=mpirun.path, settings=settings, ranks=ranks, size=total, mpirun=mpirun,
            host_counts=((Host("localhost"), total),),
        )  # fmt: skip

    def command(self, plan: Plan, options: Options, environment: Mapping[str, str]) -> list[str]:
        assert plan.mpirun is not None
        path = "HOSTFILE" if plan.has_hostfile else None
        program, variables = handover.command("JOB", options.script), handed_over(plan, options)
        return mpi.command(
            plan.mpirun, plan.host_counts, path, {**environment, **variables}, program, options.extra_mpi
        )  # fmt: skip

    def run(self, plan: Plan, options: Options) -> int:
        assert plan.mpirun is not None
        if options.max_restarts:
            print(
                "stoker: --max_restarts is ignored because mpirun cannot restart ranks; use --launcher torchrun",
                file=sys.stderr,
            )
        if options.check_hosts:
            remote_hosts.check_hosts([host.name for host, _ in plan.host_counts])
        job = secrets.token_hex(8)
        settings = replace(
            plan.settings, is_one_of_several=True, report="stderr", job=job, secret=secrets.token_hex(16)
        )
        environment = {**os.environ, **handed_over(replace(plan, settings=settings), options)}
        return mpi.launch(
            plan.mpirun, plan.host_counts, handover.command(job, options.script), environment, options.extra_mpi, job=job,
            has_hostfile=plan.has_hostfile,
        )  # fmt: skip


def _plan_hosts(
    options: Options, path: str, settings: Settings, machine: Machine, environment: Mapping[str, str]
) -> Plan:
    if options.launcher == "torchrun":
        raise UserError("--launcher torchrun takes no hostfile: start `stoker launch --machine_rank N` on each machine")
    check_is_number(options)
    hosts = hostfile.read(path)
    if options.num_machines is not None:
        if options.num_machines > len(hosts):
            raise UserError(
                f"--num_machines {options.num_machines}: hostfile {path} names {len(hosts)}; add the others to it"
            )
        hosts = hosts[: options.num_machines]
    notes = hostfile.check(hosts, path, per_host=options.per_machine)
    total = options.num_processes if options.num_processes != -1 else None
    spread = hostfile.spread(hosts, total, options.per_machine)
    size = sum(count for _, count in spread)
    check_size(size, max(count for _, count in spread))
    address, port = options.main_process_ip or spread[0][0].name, options.main_process_port
    if options.main_process_ip or port:
        port = _check_port(address, port)
        settings = replace(settings, master=(address, port))
    ranks: list[PlannedRank] = []
    for host, count in spread:
        if network.is_local(host.name):
            ranks += place_ranks(count, settings, machine, environment, first=len(ranks), host=host.name)
        else:
            ranks += [PlannedRank(len(ranks) + local, host.name, local, None) for local in range(count)]
    mpirun = mpi.find(options.launcher or "auto")
    return Plan(
        launcher=MpirunLauncher.name, program=mpirun.path, settings=settings, ranks=tuple(ranks), size=size,
        machines=len(spread), min_machines=len(spread), address=address, port=port, mpirun=mpirun,
        host_counts=tuple(spread), has_hostfile=True, notes=tuple(notes),
    )  # fmt: skip


def _check_port(address: str, port: int | None) -> int:
    is_local = network.is_local(address)
    if port is None:
        port = network.free_port() if is_local else DEFAULT_PORT
    if is_local and port and not network.port_is_free(port):
        raise UserError(
            f"port {port} on {address} is in use by another program; choose another with --main_process_port"
        )
    return port
