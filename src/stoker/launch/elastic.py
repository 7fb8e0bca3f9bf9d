"""Several processes by torchrun's elastic agent, on this machine or on several that are each started by hand or by a
batch system.

The agent is torch's; ours is the meeting point: a store that listens only on the address asked for, that says who is
missing, that compares versions, and through which every machine learns of a failure on another.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.errors import UserError
from stoker.launch import failure, network
from stoker.launch.hosts import own_versions
from stoker.launch.settings import Settings

__all__ = ["Job", "launch"]

_POLL = 0.5
_SILENCE = 15.0
"""Seconds without a sign of life after which a machine counts as gone."""
_FAILED = "stoker/failed"


@dataclass(frozen=True, kw_only=True)
class Job:
    """One machine's part of a launch."""

    local_size: int
    machines: int = 1
    machine_rank: int = 0
    address: str = "127.0.0.1"
    port: int | None = None
    max_restarts: int = 0
    wait: float = 600.0
    """Seconds to wait for the other machines."""
    grace: int = 10
    """Seconds between asking processes to end and ending them."""


def launch(job: Job, settings: Settings, script: str, arguments: list[str]) -> int:
    """Runs all ranks of this machine to their end; returns the exit code of the command."""
    listener = _listen(job) if job.machine_rank == 0 else None
    port = listener.getsockname()[1] if listener else job.port
    if port is None:
        raise UserError("--main_process_port is missing; machines other than the first need it")
    # A rank that finds too little room must be told here, once, and not by each of them.
    directory = Path(tempfile.mkdtemp(prefix="stoker-"))
    try:
        return _run_agent(job, port, listener, directory, settings, script, arguments)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        if listener:
            listener.close()


def _listen(job: Job) -> socket.socket:
    """A listening socket on the address asked for; torch's store would take all interfaces."""
    addresses = network.resolve(job.address)
    if not addresses:
        raise UserError(f"--main_process_ip {job.address} is not known to this machine; give an address of it")
    listener = socket.socket(socket.AF_INET6 if ":" in addresses[0] else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((addresses[0], job.port or 0))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        import errno

        if error.errno == errno.EADDRINUSE:
            raise UserError(
                f"port {job.port} on {job.address} is in use by another program; choose another with --main_process_port"
                + (", the same on all machines" if job.machines > 1 else "")
            ) from None
        if error.errno == errno.EADDRNOTAVAIL:
            raise UserError(
                f"--main_process_ip {job.address} is not an address of this machine, which is machine_rank 0; its own is "
                f"{network.own_address()}"
            ) from None
        raise UserError(f"cannot listen on {job.address}, port {job.port}: {error.strerror}") from None
    return listener


def _run_agent(
    job: Job,
    port: int,
    listener: socket.socket | None,
    directory: Path,
    settings: Settings,
    script: str,
    words: list[str],
) -> int:
    # Lost connections are told below in one sentence; torch would add its stack frames. The ranks keep their own setting.
    told = os.environ.get("TORCH_CPP_LOG_LEVEL")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if told is None:
        del os.environ["TORCH_CPP_LOG_LEVEL"]
    for logger in list(logging.root.manager.loggerDict):
        if logger.startswith("torch.distributed.elastic"):
            logging.getLogger(logger).setLevel(logging.CRITICAL)  # its words are for its authors
    meeting = _meeting(job, port, listener)
    rendezvous_handler_registry.register("stoker", lambda parameters: meeting)
    sent = dataclasses.replace(settings, several=True, report=str(directory))
    config: dict[str, Any] = {
        "min_nodes": job.machines,
        "max_nodes": job.machines,
        "nproc_per_node": job.local_size,
        "run_id": "stoker",
        "rdzv_backend": "stoker",
        "rdzv_endpoint": f"{job.address}:{port}",
        "max_restarts": job.max_restarts,
        "local_addr": job.address if job.machine_rank == 0 else None,
        "shutdown_timeout": job.grace,
    }
    known = {field.name for field in dataclasses.fields(LaunchConfig)}
    command = ["-m", "stoker.launch.run", sent.to_word(), script, *words]
    try:
        elastic_launch(LaunchConfig(**{k: v for k, v in config.items() if k in known}), sys.executable)(*command)
        meeting.leave()
        return 0
    except ChildFailedError as error:
        failure.wait_until_said(directory)
        first = _first(error, directory)
        meeting.leave(first)
        failure.tell(first)
        return first.code
    except SignalException as error:
        failure.wait_until_said(directory)
        elsewhere: failure.Failure | None = meeting.failure_elsewhere
        if elsewhere is not None:
            failure.tell(elsewhere)
            return elsewhere.code
        name = "Ctrl-C" if error.sigval == signal.SIGINT else error.sigval.name
        code = 128 + error.sigval
        text = f"the launch on {socket.gethostname()} was ended by {name}"
        meeting.leave(failure.Failure(None, "", time.time(), code, text))
        print(f"stoker: ended by {name}; all ranks have been ended", file=sys.stderr)
        return code


def _first(error: Any, directory: Path) -> failure.Failure:
    """The rank that ended first. One that was killed leaves no word, but its forwarder has noted the time; the others were
    ended by the agent, or have only lost their partner.
    """
    reports = {report.rank: report for report in failure.read_reports(directory)}
    ends = failure.read_ends(directory)
    host = socket.gethostname()
    found = []
    for rank, ended in error.failures.items():
        when = reports[rank].time if rank in reports else ends.get(rank, float("inf"))
        asked = ended.exitcode == -signal.SIGTERM  # by the agent, most likely
        found.append((asked and rank not in reports, when, rank, ended.exitcode))
    _, _, rank, code = min(found)
    if rank in reports:
        return reports[rank]
    return failure.killed(rank, host, -code) if code < 0 else failure.Failure(rank, host, 0.0, code, "")


def _meeting(job: Job, port: int, listener: socket.socket | None) -> Any:
    from torch.distributed import PrefixStore, TCPStore
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

    class Meeting(RendezvousHandler):  # type: ignore[misc]
        """Where the machines of a launch find each other: a store on machine 0, its members known beforehand."""

        def __init__(self) -> None:
            self._store: Any = None
            self._attempts = 0
            self._left = threading.Event()
            self._pulse = time.monotonic() + 30.0
            self.failure_elsewhere: failure.Failure | None = None

        def get_backend(self) -> str:
            return "stoker"

        @property
        def use_agent_store(self) -> bool:
            return True

        def next_rendezvous(self) -> Any:
            if self._store is None:
                self._store = self._connect(server=job.machine_rank == 0)
                if job.machines > 1:
                    self._gather()
                    for task in (self._watch, self._listen_to_pulse):
                        threading.Thread(target=task, daemon=True).start()
                store, where = self._store, port
            else:
                self._attempts += 1
                store, where = self._fresh_store(f"stoker/attempt/{self._attempts}")
            place = RendezvousStoreInfo(job.address, where)
            return RendezvousInfo(PrefixStore("stoker", store), job.machine_rank, job.machines, place)

        def _fresh_store(self, key: str) -> tuple[Any, int]:
            """Ranks that are started again get a store of their own: the keys of the last one lead to ranks that are gone."""
            if job.machine_rank > 0:
                where = int(self._store.get(key))
                return self._connect(server=False, at=where), where
            fresh = _listen(dataclasses.replace(job, port=None))
            where = fresh.getsockname()[1]
            store = self._connect(server=True, at=where, listening=fresh.detach())
            self._store.set(key, str(where))
            return store, where

        def _connect(self, *, server: bool, at: int = port, listening: int | None = None) -> Any:
            seconds = datetime.timedelta(seconds=job.wait)
            if server and listening is None and listener is not None:
                listening = os.dup(listener.fileno())
            more: dict[str, Any] = {"master_listen_fd": listening} if listening is not None else {}
            try:
                return TCPStore(job.address, at, None, server, seconds, False, multi_tenant=False, **more)
            except Exception as error:
                raise UserError(
                    f"machine {job.machine_rank} cannot reach the first machine at {job.address}, port {at}: is "
                    f"`stoker launch` running there with --machine_rank 0, and is the port open? ({_short(error)})"
                ) from None

        def _gather(self) -> None:
            """Everyone says who they are; the first machine compares."""
            mine = [socket.gethostname(), *dataclasses.astuple(own_versions())]
            self._store.set(f"stoker/here/{job.machine_rank}", json.dumps(mine))
            missing = set(range(job.machines))
            end, told = time.monotonic() + job.wait, time.monotonic() + 10
            while missing:
                missing = {rank for rank in missing if not self._store.check([f"stoker/here/{rank}"])}
                now = time.monotonic()
                if missing and now > end:
                    raise UserError(
                        f"machines {_listed(missing)} of {job.machines} did not arrive within {job.wait:.0f} s"
                    )
                if missing and now > told:
                    told = now + 60
                    print(
                        f"stoker: waiting for machine {_listed(missing)}; start `stoker launch --machine_rank N "
                        f"--main_process_ip {job.address} --main_process_port {port} ...` there",
                        file=sys.stderr,
                    )
                if missing:
                    time.sleep(0.1)
            for rank in range(job.machines):
                theirs = json.loads(self._store.get(f"stoker/here/{rank}"))
                for name, own, other in zip(("Python", "torch", "stoker"), mine[1:], theirs[1:], strict=True):
                    if own != other:
                        raise UserError(
                            f"{theirs[0]} (machine {rank}) has {name} {other}, {mine[0]} has {own}; make them the same"
                        )

        def _watch(self) -> None:
            """Ends this machine's ranks when another machine fails or is gone; says that this one is still there."""
            beats: dict[int, tuple[int, float]] = {}
            try:
                store = self._connect(server=False)
                while not self._left.wait(_POLL):
                    if store.check([_FAILED]):
                        self.failure_elsewhere = failure.parse(store.get(_FAILED).decode())
                        break
                    store.add(f"stoker/beat/{job.machine_rank}", 1)
                    self._pulse = time.monotonic()
                    if job.machine_rank == 0:
                        self._count_beats(store, beats)
            except Exception:
                self._gone(0)
            self._end_here()

        def _count_beats(self, store: Any, beats: dict[int, tuple[int, float]]) -> None:
            now = time.monotonic()
            for rank in range(1, job.machines):
                count = store.add(f"stoker/beat/{rank}", 0)
                if beats.get(rank, (-1, 0.0))[0] != count:
                    beats[rank] = (count, now)
                elif now - beats[rank][1] > _SILENCE:
                    self._gone(rank)
                    self._store.set(_FAILED, json.dumps(dataclasses.asdict(self.failure_elsewhere)))  # type: ignore[arg-type]
                    raise ConnectionError

        def _listen_to_pulse(self) -> None:
            """A machine that has lost power answers nothing, and a question to it waits for ever."""
            while not self._left.wait(1.0):
                if time.monotonic() - self._pulse > _SILENCE:
                    self._gone(0)
                    self._end_here()
                    return

        def _gone(self, rank: int) -> None:
            where = f" ({job.address})" if rank == 0 else ""
            text = f"machine {rank}{where} is gone: its launch was ended, it is down, or the network is"
            self.failure_elsewhere = self.failure_elsewhere or failure.Failure(None, "", 0.0, 1, text)

        def _end_here(self) -> None:
            if self.failure_elsewhere is not None and not self._left.is_set():
                os.kill(os.getpid(), signal.SIGTERM)

        def leave(self, first: failure.Failure | None = None) -> None:
            self._left.set()
            if job.machines == 1 or self._store is None:
                return
            with contextlib.suppress(Exception):
                if first is not None and not self._store.check([_FAILED]):
                    self._store.set(_FAILED, json.dumps(dataclasses.asdict(first)))
            if job.machine_rank == 0:
                time.sleep(3 * _POLL)  # the store lives here: the others have to see the end before it goes

        def is_closed(self) -> bool:
            return False

        def set_closed(self) -> None:
            pass

        def num_nodes_waiting(self) -> int:
            return 0

        def get_run_id(self) -> str:
            return "stoker"

        def shutdown(self) -> bool:
            return True

    return Meeting()


def _listed(numbers: set[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))


def _short(error: Exception) -> str:
    return str(error).splitlines()[0][:120] if str(error) else type(error).__name__
