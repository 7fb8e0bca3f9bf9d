"""What a person asked `stoker launch` for; `stoker.cli.launch` reads it off the command line."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Options"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What stood on the command line; None and empty where nothing did."""

    script: str
    arguments: list[str]
    module: bool = False
    config_file: str | None = None
    cpu: bool = False
    ipex: bool | None = None
    compat: bool = True
    mixed_precision: str | None = None
    dynamo_backend: str | None = None
    backend: str | None = None
    processes: int | None = None
    per_machine: int | None = None
    machines: int | None = None
    least_machines: int | None = None
    """`--nnodes 2:4`: 2, where `machines` is 4."""
    machine_rank: int | None = None
    main_process_ip: str | None = None
    main_process_port: int | None = None
    hostfile: str | None = None
    launcher: str | None = None
    threads: int | None = None
    workers: int | None = None
    cores_per_process: int | None = None
    nodes: tuple[int, ...] | None = None
    logical: bool = False
    efficiency: bool = False
    oversubscribe: bool = False
    bind: str = "auto"
    allocator: str = "default"
    max_restarts: int | None = None
    """None: 3 where the number of machines may change, else 0."""
    wait: float = 600.0
    log_dir: str | None = None
    prefix: bool = True
    check_hosts: bool = True
    genv: tuple[tuple[str, str], ...] = ()
    extra_mpi: tuple[str, ...] = ()
    dry_run: bool = False
    emit: str | None = None
    emit_options: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
