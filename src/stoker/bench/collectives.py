"""Collectives of ccl against gloo, in turns in the same processes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

__all__ = ["allreduce", "in_turns", "join", "rank_step"]


def join() -> dict[str, Any]:
    """This rank's groups, one per backend; rank, size and address are read from the environment."""
    import torch
    import torch.distributed as dist

    from stoker.comm.registration import register

    register()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    return {name: dist.new_group(backend=name) for name in ("gloo", "ccl")}


def in_turns(groups: dict[str, Any], repeats: int, call: Callable[[Any], object]) -> dict[str, float]:
    """The median time of `call` with each group; the first turn warms up."""
    import torch.distributed as dist

    seconds: dict[str, list[float]] = {name: [] for name in groups}
    for turn in range(repeats + 1):
        for name, group in groups.items():
            dist.barrier(groups["ccl"])
            start = time.perf_counter()
            call(group)
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def allreduce(x: Any, group: Any) -> None:
    import torch.distributed as dist

    dist.all_reduce(x, group=group)


def rank_step(rank: int, size: int, port: int, cpus: tuple[int, ...]) -> Callable[[tuple[int, int]], dict[str, float]]:
    """One rank of `stoker bench`: a function of bytes and repeats that returns the median time of each backend."""
    import os

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if cpus:
        os.sched_setaffinity(0, cpus)

    from stoker.comm.compiled import build

    build()  # raises if there is neither a compiled backend nor a compiler: ccl would then run on gloo
    groups = join()

    def run(asked: tuple[int, int]) -> dict[str, float]:
        import torch

        nbytes, repeats = asked
        x = torch.zeros(nbytes // 4)  # sums stay the same
        return in_turns(groups, repeats, lambda group: allreduce(x, group))

    return run
