"""What a rank does while the test breaks something under it."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta

import torch
import torch.distributed as dist


def reduce_forever(rank: int, size: int) -> str:
    """Allreduces until something fails; returns what."""
    x = torch.ones(1_000_000)
    try:
        while True:
            dist.all_reduce(x)
            x.fill_(1.0)
    except RuntimeError as error:
        return str(error)


def stay_away(rank: int, size: int, absent: int, seconds: float) -> str:
    """All but `absent` allreduce; the one comes too late."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    if rank == absent:
        time.sleep(seconds)
        return ""
    try:
        dist.all_reduce(torch.ones(10), group=group)
    except RuntimeError as error:
        return str(error)
    return "no error"


def disagree(rank: int, size: int, how: str) -> str:
    calls = {
        "size": lambda: dist.all_reduce(torch.ones(1000 + rank)),
        "dtype": lambda: dist.all_reduce(torch.ones(1000, dtype=torch.float32 if rank else torch.float64)),
        "operation": lambda: dist.all_reduce(torch.ones(8)) if rank else dist.broadcast(torch.ones(8), 0),
        "root": lambda: dist.broadcast(torch.ones(8), rank),
    }
    try:
        calls[how]()
        dist.all_reduce(torch.ones(1))  # a broadcast's source does not wait: it learns it here
    except RuntimeError as error:
        return str(error)
    return "no error"


def die(rank: int, size: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def segments(rank: int, size: int) -> list[str]:
    """The names under which this process maps shared memory of Stoker."""
    with open("/proc/self/maps") as maps:
        names = {line.split(maxsplit=5)[-1].strip() for line in maps}
    return sorted(name for name in names if name.startswith(("/memfd:stoker", "/dev/shm/stoker")))


def slow_down(rank: int, size: int, slow: int) -> list[float]:
    """Twenty allreduces, the rank `slow` ten times as long between them; the sums, and who was waited for."""
    sums = []
    for _ in range(20):
        time.sleep(0.03 if rank == slow else 0.003)
        x = torch.full((100_000,), float(rank))
        dist.all_reduce(x)
        sums.append(x.unique().item())
    return sums


def fail_later(rank: int, size: int, absent: int) -> str:
    """An asynchronous allreduce that one rank does not join: where the error shows."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    if rank == absent:
        time.sleep(2.5)
        return "stayed away"
    work = dist.all_reduce(torch.ones(10), group=group, async_op=True)
    try:
        work.wait()
    except RuntimeError as error:
        return f"wait: {error}"
    return "no error"
