"""Several ranks that stay alive between tests: starting a process costs seconds, a collective microseconds.

Each rank is a process of its own in one torch.distributed job; a test names a function of comm.cases, all ranks run it,
and the first complaint of any rank is the test's.
"""

from __future__ import annotations

import importlib
import multiprocessing.forkserver
import os
import socket
import traceback
from multiprocessing.connection import Connection
from typing import Any

from rig import warm


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _serve(rank: int, size: int, backend: str, port: int, environment: dict[str, str], pipe: Connection) -> None:
    os.environ.clear()  # of the server that has forked this process
    os.environ.update(environment, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), OMP_NUM_THREADS="1")
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from stoker.comm.registration import register

    register()
    torch.set_num_threads(1)
    timeout = timedelta(seconds=float(environment.get("TIMEOUT", "60")))
    dist.init_process_group(backend, timeout=timeout, rank=rank, world_size=size)
    pipe.send("ready")
    while (order := pipe.recv()) is not None:
        module, name, arguments = order
        try:
            pipe.send(("ok", getattr(importlib.import_module(module), name)(rank, size, *arguments)))
        except BaseException:
            pipe.send(("failed", traceback.format_exc()))
    dist.destroy_process_group()
    pipe.send("gone")


def _forking_context() -> Any:
    """Processes forked from one that has imported torch and transformers, none of Stoker's modules, and has no threads."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*warm.TORCH, *warm.OTHERS, *warm.TRANSFORMERS])
    before = dict(os.environ)
    os.environ.update(warm.FOR_SERVERS)
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return context


class Ranks:
    """A job of `size` ranks on `backend`. `environment` may hold a dict per rank, or one for all."""

    def __init__(
        self, backend: str, size: int, environment: dict[str, str] | list[dict[str, str]] | None = None
    ) -> None:
        context = _forking_context()
        port = free_port()
        self.processes, self.pipes = [], []
        for rank in range(size):
            here, there = context.Pipe()
            own = {**os.environ, **(environment[rank] if isinstance(environment, list) else (environment or {}))}
            process = context.Process(target=_serve, args=(rank, size, backend, port, own, there), daemon=True)
            process.start()
            there.close()
            self.processes.append(process)
            self.pipes.append(here)
        for rank in range(size):
            assert self._receive(rank, 400) == "ready"  # the first job may compile the backend

    def _receive(self, rank: int, seconds: float) -> Any:
        if not self.pipes[rank].poll(seconds):
            raise TimeoutError(f"rank {rank} said nothing for {seconds} s")
        return self.pipes[rank].recv()

    def start(self, name: str, *arguments: Any, module: str = "comm.cases", ranks: list[int] | None = None) -> None:
        for rank in range(len(self.pipes)) if ranks is None else ranks:
            self.pipes[rank].send((module, name, arguments))

    def finish(self, rank: int, seconds: float = 60) -> tuple[str, Any]:
        """How the case went on `rank`: ("ok", result) or ("failed", traceback)."""
        outcome: tuple[str, Any] = self._receive(rank, seconds)
        return outcome

    def run(self, name: str, *arguments: Any, module: str = "comm.cases") -> list[Any]:
        """The results of all ranks; AssertionError with the traceback of the first rank that failed."""
        self.start(name, *arguments, module=module)
        outcomes = [self.finish(rank) for rank in range(len(self.pipes))]
        for rank, (state, result) in enumerate(outcomes):
            assert state == "ok", f"rank {rank}:\n{result}"
        return [result for _, result in outcomes]

    def close(self) -> list[int | None]:
        """Ends the job in good order and returns the exit codes."""
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join(20)
        self.kill()
        return [process.exitcode for process in self.processes]

    def kill(self) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
                process.join(10)
