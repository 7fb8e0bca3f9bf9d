"""`stoker config check`: contradictions in a config file, found before a launch does."""

from __future__ import annotations

from dataclasses import dataclass

from stoker.errors import UserError
from stoker.launch.config.config_file import Config
from stoker.launch.config.migrate import unknown
from stoker.launch.placement import hostfile
from stoker.launch.placement.divide_cores import place
from stoker.machine import Machine, network

__all__ = ["Finding", "check"]


@dataclass(frozen=True)
class Finding:
    severity: str
    """wrong: a launch would fail; odd: it would run, but probably not as meant."""
    text: str


def check(config: Config, machine: Machine) -> list[Finding]:
    """Everything that does not fit together, or not with this machine."""
    texts = [*config.notes, *(f"{key}: unknown to Stoker and to accelerate, and not read" for key in unknown(config))]
    if config.mixed_precision in ("fp16", "fp8"):
        texts.append(f"mixed_precision {config.mixed_precision} is for GPUs; on CPUs use bf16 or no")
    if config.dynamo_backend:
        texts.append(
            "torch dynamo did not make training on CPUs faster where it was measured, and compiles for a minute"
        )
    found = [_odd(text) for text in texts] + _numbers(config, machine) + _addresses(config)
    return found + _hosts(config, config.hostfile) if config.hostfile else found


def _wrong(text: str) -> Finding:
    return Finding("wrong", text)


def _odd(text: str) -> Finding:
    return Finding("odd", text)


def _numbers(config: Config, machine: Machine) -> list[Finding]:
    processes, machines, rank = config.num_processes or 1, config.num_machines or 1, config.machine_rank or 0
    if not config.is_distributed:
        text = f"num_processes is {processes}, but distributed_type is NO: one process will run; set MULTI_CPU"
        return [_odd(text)] if processes > 1 else []
    if processes == -1:
        return [_odd("num_processes is open (-1): every launch needs --num_processes")]
    found = []
    if rank >= machines:
        found.append(_wrong(f"machine_rank {rank}: machines are numbered 0 to {machines - 1}"))
    if processes % machines and not config.hostfile:
        found.append(_wrong(f"{processes} processes cannot be divided evenly over {machines} machines"))
    local = -(-processes // machines)
    try:
        place(machine, local, threads=config.threads, workers=config.ccl_workers or 0)
    except UserError as error:
        found.append(_wrong(f"{processes} processes on {machines} machines are {local} on each: {error}"))
    return found


def _addresses(config: Config) -> list[Finding]:
    found = []
    address, port, machines = config.main_process_ip, config.main_process_port, config.num_machines or 1
    is_local = address is None or network.is_local(address)
    if config.is_distributed and machines > 1 and not config.hostfile and config.launcher in (None, "torchrun"):
        if not address:
            found.append(_wrong(f"{machines} machines need main_process_ip, or a hostfile for mpirun"))
        if port is None:
            found.append(_odd("main_process_port is not set: 29500 will be used"))
    if address and not network.resolve(address):
        found.append(
            _wrong(f"main_process_ip {address} is not known to this machine: a typing error, or missing in DNS")
        )
    elif not is_local and config.machine_rank is None and not config.hostfile:
        own = network.own_address()
        found.append(
            _wrong(f"machine_rank is 0, but main_process_ip {address} is not this machine, whose address is {own}")
        )
    elif port and is_local and not network.port_is_free(port, address or ""):
        found.append(_wrong(f"port {port} is in use by another program here; choose another main_process_port"))
    return found


def _hosts(config: Config, path: str) -> list[Finding]:
    machines, per_host = 1, None
    if config.is_distributed and config.num_machines:
        machines, per_host = config.num_machines, -(-(config.num_processes or 1) // config.num_machines)
    try:
        hosts = hostfile.read(path)
        found = [_odd(note) for note in hostfile.check(hosts, path, per_host=per_host)]
    except UserError as error:
        return [_wrong(str(error))]
    if 1 < machines != len(hosts):
        text = f"num_machines is {machines}, but {path} names {len(hosts)} hosts"
        found.append(_wrong(text) if len(hosts) < machines else _odd(text))
    return found
