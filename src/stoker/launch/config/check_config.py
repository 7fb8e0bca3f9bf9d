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
    found = [Finding("odd", note) for note in config.notes]
    found += [Finding("odd", f"{key}: unknown to Stoker and to accelerate, and not read") for key in unknown(config)]
    found += _numbers(config, machine)
    found += _addresses(config)
    if config.hostfile:
        found += _hosts(config)
    if config.mixed_precision in ("fp16", "fp8"):
        found.append(Finding("odd", f"mixed_precision {config.mixed_precision} is for GPUs; on CPUs use bf16 or no"))
    if config.dynamo_backend != "no":
        found.append(
            Finding(
                "odd", "torch dynamo did not speed up training on CPUs where it was measured, and compiles a minute"
            )
        )
    return found


def _numbers(config: Config, machine: Machine) -> list[Finding]:
    if not config.several:
        if config.num_processes > 1:
            return [
                Finding(
                    "odd", f"{config.num_processes} processes, but distributed_type NO: one will run; set MULTI_CPU"
                )
            ]
        return []
    if config.num_processes == -1:
        return [Finding("odd", "num_processes is open (-1): give --num_processes to every launch")]
    found = []
    if config.num_machines < 1 or config.num_processes < 1:
        return [
            Finding(
                "wrong", f"{config.num_processes} processes on {config.num_machines} machines: both must be at least 1"
            )
        ]
    if not 0 <= config.machine_rank < config.num_machines:
        found.append(
            Finding(
                "wrong", f"machine_rank {config.machine_rank}: machines are numbered 0 to {config.num_machines - 1}"
            )
        )
    if config.num_processes % config.num_machines and not config.hostfile:
        text = f"{config.num_processes} processes cannot be divided evenly over {config.num_machines} machines"
        found.append(Finding("wrong", text))
    local = max(-(-config.num_processes // config.num_machines), 1)
    try:
        place(machine, local, threads=config.threads, workers=config.ccl_workers or 0)
    except UserError as error:
        text = f"{config.num_processes} processes on {config.num_machines} machines are {local} on each: {error}"
        found.append(Finding("wrong", text))
    return found


def _addresses(config: Config) -> list[Finding]:
    found = []
    address, port = config.main_process_ip, config.main_process_port
    if config.several and config.num_machines > 1 and not config.hostfile and config.launcher in ("auto", "torchrun"):
        if not address:
            found.append(
                Finding("wrong", f"{config.num_machines} machines need main_process_ip, or a hostfile for mpirun")
            )
        if port is None:
            found.append(Finding("odd", "main_process_port is not set: 29500 will be used"))
    if address and not network.resolve(address):
        found.append(
            Finding(
                "wrong", f"main_process_ip {address} is not known to this machine: a typing error, or missing in DNS"
            )
        )
    elif address and config.machine_rank == 0 and not config.hostfile and not network.is_local(address):
        text = f"machine_rank is 0, but main_process_ip {address} is not this machine, whose address is {network.own_address()}"
        found.append(Finding("wrong", text))
    elif (
        port
        and 0 < port <= 65535
        and (address is None or network.is_local(address))
        and not network.port_is_free(port, address or "")
    ):
        found.append(
            Finding("wrong", f"port {port} is in use by another program here; choose another main_process_port")
        )
    if port is not None and not 0 <= port <= 65535:
        found.append(Finding("wrong", f"main_process_port {port} is not a port, 0 to 65535"))
    return found


def _hosts(config: Config) -> list[Finding]:
    assert config.hostfile is not None
    try:
        hosts = hostfile.read(config.hostfile)
        per_host = (
            -(-config.num_processes // config.num_machines) if config.several and config.num_machines > 1 else None
        )
        found = [Finding("odd", note) for note in hostfile.check(hosts, config.hostfile, per_host=per_host)]
    except UserError as error:
        return [Finding("wrong", str(error))]
    if config.several and config.num_machines > 1 and len(hosts) != config.num_machines:
        text = f"num_machines is {config.num_machines}, but {config.hostfile} names {len(hosts)} hosts"
        found.append(Finding("wrong" if len(hosts) < config.num_machines else "odd", text))
    return found
