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
    """error: a launch would fail; warning: it would run, but probably not as intended."""
    text: str


def check(config: Config, machine: Machine) -> list[Finding]:
    """All contradictions: within the file, and with this machine."""
    texts = [
        *config.notes,
        *(f"{key}: ignored, because neither Stoker nor accelerate has such a key" for key in unknown(config)),
    ]
    if config.mixed_precision in ("fp16", "fp8"):
        texts.append(f"mixed_precision {config.mixed_precision} is for GPUs; on CPUs use bf16 or no")
    if config.dynamo_backend:
        texts.append(
            "dynamo_backend is set; torch dynamo takes a minute to compile and did not make training on CPUs faster where "
            "it was measured"
        )
    found = [_warning(text) for text in texts] + _numbers(config, machine) + _addresses(config)
    return found + _hosts(config, config.hostfile) if config.hostfile else found


def _error(text: str) -> Finding:
    return Finding("error", text)


def _warning(text: str) -> Finding:
    return Finding("warning", text)


def _numbers(config: Config, machine: Machine) -> list[Finding]:
    processes, machines, rank = config.num_processes or 1, config.num_machines or 1, config.machine_rank or 0
    if not config.is_distributed:
        text = f"num_processes is {processes}, but distributed_type is NO: one process will run; set MULTI_CPU"
        return [_warning(text)] if processes > 1 else []
    if processes == -1:
        return [_warning("num_processes is -1, so every launch needs --num_processes")]
    found = []
    if rank >= machines:
        found.append(_error(f"machine_rank {rank}: machines are numbered 0 to {machines - 1}"))
    if processes % machines and not config.hostfile:
        found.append(_error(f"{processes} processes cannot be divided evenly over {machines} machines; use a multiple"))
    local = -(-processes // machines)
    try:
        place(machine, local, threads=config.threads, workers=config.ccl_workers or 0)
    except UserError as error:
        found.append(_error(f"{processes} processes on {machines} machines are {local} on each: {error}"))
    return found


def _addresses(config: Config) -> list[Finding]:
    found = []
    address, port, machines = config.main_process_ip, config.main_process_port, config.num_machines or 1
    is_local = address is None or network.is_local(address)
    if config.is_distributed and machines > 1 and not config.hostfile and config.launcher in (None, "torchrun"):
        if not address:
            found.append(_error(f"{machines} machines need main_process_ip, or a hostfile for mpirun"))
        if port is None:
            found.append(_warning("main_process_port is not set: 29500 will be used"))
    if address and not network.resolve(address):
        found.append(
            _error(
                f"main_process_ip {address} is not known to this machine; correct it, or add it to DNS or /etc/hosts"
            )
        )
    elif not is_local and config.machine_rank is None and not config.hostfile:
        own = network.own_address()
        found.append(
            _error(f"machine_rank is 0, but main_process_ip {address} is not this machine, whose address is {own}")
        )
    elif port and is_local and not network.port_is_free(port, address or ""):
        found.append(
            _error(f"port {port} is in use by another program on this machine; choose another main_process_port")
        )
    return found


def _hosts(config: Config, path: str) -> list[Finding]:
    machines, per_host = 1, None
    if config.is_distributed and config.num_machines:
        machines, per_host = config.num_machines, -(-(config.num_processes or 1) // config.num_machines)
    try:
        hosts = hostfile.read(path)
        found = [_warning(note) for note in hostfile.check(hosts, path, per_host=per_host)]
    except UserError as error:
        return [_error(str(error))]
    if 1 < machines != len(hosts):
        text = f"num_machines is {machines}, but {path} names {len(hosts)} hosts"
        found.append(_error(text) if len(hosts) < machines else _warning(text))
    return found
