"""Starts several processes with torchrun's elastic agent, on this machine or on several that are each started by hand or by a
batch system.

The agent is torch's; the rendezvous (stoker.launch.launchers.rendezvous) and what is printed at the end are Stoker's.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import secrets
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from stoker.errors import UserError
from stoker.launch.launchers.elastic_job import Job, listen
from stoker.launch.launchers.job_secret import job_secret
from stoker.launch.rank import failure, handover, leftovers
from stoker.launch.rank.rank_settings import Settings
from stoker.requires import require

__all__ = ["Job", "launch"]


def launch(job: Job, settings: Settings, script: str, arguments: list[str]) -> int:
    """Runs all ranks of this machine to their end; returns the exit code of the command."""
    secret = job_secret() if job.machines > 1 else ""
    listener = listen(job) if job.machine_rank == 0 else None
    port = listener.getsockname()[1] if listener else job.port
    if port is None:
        raise UserError("--main_process_port is missing; machines other than the first need it")
    if listener is not None and job.machines == 1:  # the port is free for a script that serves a store of its own there
        listener.close()
        listener = None
    os.environ[leftovers.JOB] = name = secrets.token_hex(8)  # the agent has no other way to give its ranks variables
    code = 1
    try:
        with leftovers.directory(name) as directory:
            sent = dataclasses.replace(settings, is_one_of_several=True, report=str(directory), secret=secret)
            code = _run_agent(job, port, listener, directory, sent, script, arguments)
        return code
    finally:
        if code:
            leftovers.end(name)
        if listener:
            listener.close()


def _run_agent(
    job: Job,
    port: int,
    listener: socket.socket | None,
    directory: Path,
    settings: Settings,
    script: str,
    arguments: list[str],
) -> int:
    # Lost connections are reported below in one sentence; torch would print a C++ stack. The ranks keep their own setting.
    log_level = os.environ.get("TORCH_CPP_LOG_LEVEL")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    require("elastic launch")
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from stoker.launch.launchers.rendezvous import Rendezvous

    if log_level is None:
        del os.environ["TORCH_CPP_LOG_LEVEL"]
    for logger in list(logging.root.manager.loggerDict):
        if logger.startswith("torch.distributed.elastic"):
            logging.getLogger(logger).setLevel(logging.CRITICAL)  # what users need to know is printed below
    rendezvous = Rendezvous(job, port, listener, directory, settings.secret)
    rendezvous_handler_registry.register("stoker", lambda parameters: rendezvous)
    config: dict[str, Any] = {
        "min_nodes": job.least,
        "max_nodes": job.machines,
        "nproc_per_node": job.local_size,
        "run_id": "stoker",
        "rdzv_backend": "stoker",
        "rdzv_endpoint": f"{job.address}:{port}",
        "max_restarts": job.max_restarts,
        "local_addr": job.address if job.machine_rank == 0 else None,
        "shutdown_timeout": job.grace,
        "logs_specs": DefaultLogsSpecs(str(directory / "agent")),  # else it makes a directory that nobody removes
    }
    command, carried = handover.rank_command(settings, script, arguments)
    os.environ.update(carried)
    try:
        elastic_launch(LaunchConfig(**config), command[0])(*command[1:])
        rendezvous.finish()
        return 0
    except ChildFailedError as error:
        leftovers.end(os.environ[leftovers.JOB])  # first: forwarders wait until their pipe is closed
        failure.wait_for_output(directory)
        first = _first(error, directory)
        rendezvous.leave(first)
        failure.print_last(first)
        return first.code
    except SignalException as error:
        leftovers.end(os.environ[leftovers.JOB])
        failure.wait_for_output(directory)
        elsewhere: failure.Failure | None = rendezvous.failure_elsewhere
        if elsewhere is not None:
            failure.print_last(elsewhere)
            return elsewhere.code
        name = "Ctrl-C" if error.sigval == signal.SIGINT else error.sigval.name
        code = 128 + error.sigval
        text = f"the launch on {socket.gethostname()} was ended by {name}"
        alone = job.elastic and job.machine_rank != 0  # the others continue without this one
        rendezvous.leave(None if alone else failure.of_launch(text, code))
        where = " of this machine" if alone else ""
        print(f"stoker: ended by {name}; all ranks{where} have been ended", file=sys.stderr)
        return code


def _first(error: Any, directory: Path) -> failure.Failure:
    """The rank that ended first. One that was killed leaves no report, but its forwarder has noted the time; the others were
    ended by the agent, or lost the connection to the first.
    """
    reports = {report.rank: report for report in failure.read_reports(directory)}
    ends = failure.read_ends(directory)
    host = socket.gethostname()
    found = []
    for rank, ended in error.failures.items():
        when = reports[rank].time if rank in reports else ends.get(rank, float("inf"))
        terminated = ended.exitcode == -signal.SIGTERM  # by the agent, most likely
        found.append((terminated and rank not in reports, when, rank, ended.exitcode))
    _, _, rank, code = min(found)
    if rank in reports:
        return reports[rank]
    return failure.killed(rank, host, -code) if code < 0 else failure.Failure(rank, host, 0.0, code, "")
