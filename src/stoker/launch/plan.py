"""From what was asked to what will run: a `Plan`, made without starting anything, which `--dry-run` prints."""

from __future__ import annotations

import shlex
import socket
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from stoker.errors import UserError
from stoker.hf.secrets import HIDDEN, is_secret
from stoker.launch.config.config_file import Config
from stoker.launch.launchers import mpi
from stoker.launch.options import Options
from stoker.launch.placement import binding, hostfile
from stoker.launch.placement.divide_cores import Placement
from stoker.launch.placement.hostfile import Host
from stoker.launch.rank import handover
from stoker.launch.rank.rank_settings import Settings
from stoker.machine import Machine, network
from stoker.numbers import whole_number

__all__ = ["Plan", "PlannedRank", "counts", "handed_over", "launch_command", "make", "settings_for", "show",
           "srun_command"]  # fmt: skip


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
    """single, torchrun, impi, mpich, openmpi or slurm."""
    settings: Settings
    ranks: tuple[PlannedRank, ...]
    size: int
    counts: tuple[tuple[Host, int], ...] = ()
    machines: int = 1
    least: int = 1
    """Machines without which the job cannot go on; fewer than `machines` after `--nnodes 1:2`."""
    machine_rank: int = 0
    """-1: not the first; which one, that will say."""
    address: str = "127.0.0.1"
    port: int | None = None
    mpirun: mpi.Mpirun | None = None
    with_hostfile: bool = False
    notes: tuple[str, ...] = ()


def settings_for(options: Options, config: Config) -> Settings:
    """What all ranks are told; the command line before the file."""
    precision = options.mixed_precision or (config.mixed_precision if config.mixed_precision != "no" else None)
    dynamo = options.dynamo_backend or (config.dynamo_backend if config.dynamo_backend != "no" else None)
    ipex = options.ipex if options.ipex is not None else (None if config.ipex else False)
    workers = options.workers if options.workers is not None else config.ccl_workers
    return Settings(
        module=options.module,
        compat=options.compat,
        ipex=ipex,
        backend=options.backend,
        mixed_precision=precision,
        dynamo_backend=dynamo,
        threads=options.threads or config.threads,
        workers=workers or 0,
        logical=options.logical,
        efficiency=options.efficiency,
        cores_per_process=options.cores_per_process,
        nodes=options.nodes,
        oversubscribe=options.oversubscribe,
        bind=options.bind,
        allocator=options.allocator,
        log_dir=options.log_dir,
        prefix=options.prefix,
        environment=options.genv,
    )


def make(options: Options, config: Config, machine: Machine, environment: Mapping[str, str]) -> Plan:
    settings = settings_for(options, config)
    launcher = options.launcher or config.launcher
    hosts_file = options.hostfile or (config.hostfile if launcher != "torchrun" else None)
    merged = {**environment, **dict(options.genv)}
    if options.least_machines is not None and (hosts_file or launcher in ("slurm", "impi", "mpich", "openmpi")):
        raise UserError(
            f"--nnodes {options.least_machines}:{options.machines}: only torchrun's agent goes on without a machine; start "
            "`stoker launch --launcher torchrun --nnodes ...` on each, or give one number"
        )
    if launcher == "slurm":
        return _slurm(options, config, settings)
    if hosts_file:
        return _by_mpirun(options, config, settings, launcher, hosts_file, machine, merged)
    machines = options.machines or config.num_machines
    rank = options.machine_rank if options.machine_rank is not None else config.machine_rank
    total, local = counts(options, config, machines)
    if launcher in ("impi", "mpich", "openmpi") and machines == 1:
        placed = ((Host("localhost"), total),)
        ranks = _ranks(socket.gethostname(), 0, total, settings, machine, merged)
        return Plan(
            launcher=launcher, settings=settings, ranks=ranks, size=total, counts=placed, mpirun=mpi.find(launcher)
        )
    if machines > 1:
        return _by_hand(options, config, settings, machine, merged, machines, rank, total, local)
    ranks = _ranks(socket.gethostname(), 0, total, settings, machine, merged)
    if total == 1:
        return Plan(launcher="single", settings=settings, ranks=ranks, size=1)
    port = options.main_process_port if options.main_process_port is not None else config.main_process_port
    return Plan(launcher="torchrun", settings=settings, ranks=ranks, size=total, port=port)


def counts(options: Options, config: Config, machines: int) -> tuple[int, int]:
    """Processes in all, and on each machine."""
    total = options.processes
    if total is None and options.per_machine is not None:
        return _of_sane_size(options.per_machine * machines, options.per_machine)
    if total is None and config.several:
        total = config.num_processes
        if total == -1:
            raise UserError("the config file leaves the number of processes open; give it with --num_processes")
    total = machines if total is None else total
    if total % machines:
        raise UserError(
            f"{total} processes cannot be divided evenly over {machines} machines; ask for a multiple of {machines}, or use a "
            "hostfile with slots"
        )
    local = total // machines
    if options.per_machine is not None and options.per_machine != local:
        raise UserError(
            f"{total} processes on {machines} machines are {local} on each, but -ppn is {options.per_machine}"
        )
    return _of_sane_size(total, local)


def _of_sane_size(total: int, local: int) -> tuple[int, int]:
    """A typing error must not make a plan that takes all memory to draw up."""
    if total > _MOST or local > _MOST_LOCAL:
        raise UserError(
            f"{total:,} processes, {local:,} on each machine, are too many; the most is {_MOST:,}, and {_MOST_LOCAL:,} on each"
        )
    return total, local


def _by_hand(
    options: Options, config: Config, settings: Settings, machine: Machine, environment: Mapping[str, str],
    machines: int, rank: int, total: int, local: int,
) -> Plan:  # fmt: skip
    """Several machines, `stoker launch` started on each of them."""
    address = options.main_process_ip or config.main_process_ip or environment.get("MASTER_ADDR")
    port = options.main_process_port if options.main_process_port is not None else config.main_process_port
    if port is None:
        port = whole_number(environment.get("MASTER_PORT", ""))
    if not address:
        raise UserError(
            f"{machines} machines need --main_process_ip, the address of machine 0 (this machine's is {network.own_address()}), "
            "or a hostfile for mpirun (-f)"
        )
    least = options.least_machines or machines
    if least < machines and options.machine_rank is None and rank == 0 and not network.is_local(address):
        rank = -1
    elif not 0 <= rank < machines:
        raise UserError(f"--machine_rank {rank}: there are {machines} machines, numbered 0 to {machines - 1}")
    ranks = _ranks(socket.gethostname(), abs(rank) * local, local, settings, machine, environment)
    return Plan(
        launcher="torchrun", settings=settings, ranks=ranks, size=total, machines=machines, least=least,
        machine_rank=rank, address=address, port=29500 if port is None else port,
    )  # fmt: skip


def _by_mpirun(
    options: Options, config: Config, settings: Settings, launcher: str, path: str, machine: Machine,
    environment: Mapping[str, str],
) -> Plan:  # fmt: skip
    if launcher == "torchrun":
        raise UserError("--launcher torchrun takes no hostfile: start `stoker launch --machine_rank N` on each machine")
    named = hostfile.read(path)
    if options.machines is not None:
        if options.machines > len(named):
            raise UserError(
                f"--num_machines {options.machines}: hostfile {path} names {len(named)}; add the others to it"
            )
        named = named[: options.machines]
    per_host = options.per_machine
    if options.processes is None and per_host is None and config.several and config.num_processes > 0:
        total: int | None = config.num_processes
    else:
        total = options.processes
    if (
        per_host is None
        and total is not None
        and config.several
        and options.processes is None
        and config.num_machines > 1
    ):
        per_host = -(-total // config.num_machines)
    notes = hostfile.check(named, path, per_host=per_host)
    spread = hostfile.spread(named, total, per_host)
    size, _ = _of_sane_size(sum(count for _, count in spread), max(count for _, count in spread))
    first = spread[0][0].name
    address = options.main_process_ip or config.main_process_ip or first
    port = options.main_process_port if options.main_process_port is not None else config.main_process_port
    master = None
    if options.main_process_ip or config.main_process_ip or port:
        if port is None:
            port = network.free_port() if network.is_local(address) else 29500
        if network.is_local(address) and port and not network.port_is_free(port):
            raise UserError(
                f"port {port} on {address} is in use by another program; choose another with --main_process_port"
            )
        master = (address, port)
    ranks: list[PlannedRank] = []
    for host, count in spread:
        if network.is_local(host.name):
            ranks += _ranks(host.name, len(ranks), count, settings, machine, environment)
        else:
            ranks += [PlannedRank(len(ranks) + local, host.name, local, None) for local in range(count)]
    return Plan(
        launcher=launcher, settings=replace(settings, master=master), ranks=tuple(ranks), size=size, counts=tuple(spread),
        machines=len(spread), address=address, port=port, mpirun=mpi.find(launcher), with_hostfile=True, notes=tuple(notes),
    )  # fmt: skip


def _slurm(options: Options, config: Config, settings: Settings) -> Plan:
    machines = options.machines or config.num_machines
    total, local = counts(options, config, machines)
    ranks = tuple(PlannedRank(rank, "by Slurm", rank % local, None) for rank in range(total))
    return Plan(launcher="slurm", settings=settings, ranks=ranks, size=total, machines=machines)


def _ranks(
    host: str, first: int, count: int, settings: Settings, machine: Machine, environment: Mapping[str, str]
) -> tuple[PlannedRank, ...]:
    """Placed here already, so that what does not fit is said once, before anything starts."""
    shares, _ = binding.choose_all(settings, machine, count, environment)
    return tuple(PlannedRank(first + local, host, local, shares[local] if shares else None) for local in range(count))


def handed_over(plan: Plan, options: Options) -> dict[str, str]:
    """The variables by which the ranks of mpirun and srun get what others have on the command line."""
    return handover.variables([plan.settings.to_word(), options.script, *options.arguments])


def show(plan: Plan, options: Options, environment: Mapping[str, str]) -> str:
    """What `--dry-run` prints."""
    lines = [f"launcher: {_name(plan)}; {plan.size} process{'es' * (plan.size > 1)} on {_machines(plan)}"]
    lines += [f"note: {note}" for note in plan.notes]
    for planned in plan.ranks:
        lines.append(f"rank {planned.rank} on {planned.host}")
        share = planned.placement
        if share is None:
            lines.append("  cores    decided there" if plan.settings.bind != "none" else "  cores    not pinned")
        else:
            lines.append(f"  cores    {binding.ranges(share.cpus)}")
            if share.worker_cpus:
                lines.append(f"  workers  {binding.ranges(share.worker_cpus)}")
            lines.append(
                f"  memory   {'node ' + binding.ranges(share.nodes) if share.nodes else 'not bound (one NUMA node)'}"
            )
            lines.append(f"  threads  {share.threads}")
        given = {name: HIDDEN if is_secret(name) else value for name, value in plan.settings.environment}
        variables = {**rank_variables(plan, planned), **given}
        lines.append("  environment  " + " ".join(f"{key}={shlex.quote(value)}" for key, value in variables.items()))
    if plan.mpirun is not None or plan.launcher == "slurm" or plan.settings.environment:
        lines.append("handed over by the environment: " + shlex.join([options.script, *options.arguments]))
    lines.append("command: " + shlex.join(launch_command(plan, options, environment)))
    return "\n".join(lines)


def rank_variables(plan: Plan, planned: PlannedRank) -> dict[str, str]:
    """The variables a rank gets, as far as they are known beforehand."""
    found = plan.settings.accelerate_variables()
    if planned.placement is not None:
        found |= binding.thread_variables(planned.placement)
    if plan.size > 1:
        found |= {
            "RANK": str(planned.rank),
            "WORLD_SIZE": str(plan.size),
            "LOCAL_RANK": str(planned.local_rank),
            "MASTER_ADDR": plan.address,
            "MASTER_PORT": str(plan.port) if plan.port else "(a free one)",
        }
    return found


def launch_command(plan: Plan, options: Options, environment: Mapping[str, str]) -> list[str]:
    if plan.mpirun is None and plan.launcher != "slurm":
        return handover.rank_command(plan.settings, options.script, options.arguments)[0]
    carried = handed_over(plan, options)
    words = handover.command("JOB", options.script)
    if plan.mpirun is not None:
        path = "HOSTFILE" if plan.with_hostfile else None
        return mpi.command(plan.mpirun, plan.counts, path, {**environment, **carried}, words, options.extra_mpi)
    return srun_command(plan, words, carried, environment)


def srun_command(plan: Plan, words: list[str], carried: Collection[str], environment: Mapping[str, str]) -> list[str]:
    per_node = str(plan.size // plan.machines)
    # An allocation made with --export=NONE or a list of names would not let the variables through.
    exported = environment.get("SLURM_EXPORT_ENV") or "ALL"
    exported = ",".join([*([exported] if exported not in ("NONE", "NIL") else []), *carried])
    return [
        "srun",
        "-N",
        str(plan.machines),
        "-n",
        str(plan.size),
        "--ntasks-per-node",
        per_node,
        f"--export={exported}",
        "--kill-on-bad-exit=1",
        *words,
    ]


def _name(plan: Plan) -> str:
    names = {"single": "this process", "torchrun": "torchrun's elastic agent", "slurm": "srun"}
    return names.get(plan.launcher) or f"{plan.mpirun.path if plan.mpirun else plan.launcher}"


def _machines(plan: Plan) -> str:
    least = f"{plan.least} to " if 1 <= plan.least < plan.machines and plan.launcher == "torchrun" else ""
    return f"{least}{plan.machines} machine{'s' * (plan.machines > 1)}"
