"""What a rank does while its group ends under it: destroyed, aborted, or forked away."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

LONG = timedelta(seconds=300)  # whoever waits for a timeout makes the test fail


def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return "no error"


def backend_of(group: Any) -> Any:
    return group._get_backend(torch.device("cpu"))


def destroy_while_receiving(rank: int, size: int, met: bool) -> str:
    """A message that never comes; `met`: one did before, so that the two ranks share a channel."""
    group = dist.new_group(timeout=LONG)
    if met:
        _ = dist.send(torch.ones(1), 1, group=group) if rank == 0 else dist.recv(torch.ones(1), 0, group=group)
    work: Any = dist.irecv(torch.ones(1), 0, group=group) if rank == 1 else None
    dist.barrier()
    time.sleep(0.2)  # the lane's thread may have begun to wait; it need not
    if rank == 0:  # the receiver goes first: nobody has left whom it could miss
        dist.barrier()
    dist.destroy_process_group(group)
    if rank == 1:
        dist.barrier()
    return error_of(work.wait) if work is not None else ""


def abort_while_blocked(rank: int, size: int, asynchronous: bool) -> list[str]:
    """The last rank stays away from a collective, and another thread aborts the group that the others wait in."""
    errors = []
    for _ in range(3):
        group = dist.new_group(timeout=LONG)
        if rank == size - 1:
            dist.barrier()
            dist.destroy_process_group(group)
            continue
        stop = threading.Timer(0.2, backend_of(group).abort)
        stop.start()
        x = torch.ones(1_000_000)
        work = dist.all_reduce(x, group=group, async_op=True) if asynchronous else None
        errors.append(error_of(work.wait if work is not None else lambda: dist.all_reduce(x, group=group)))  # noqa: B023
        stop.join()
        dist.barrier()
        dist.destroy_process_group(group)
    return errors


def destroy_while_another_thread_reduces(rank: int, size: int) -> float:
    """What was begun is finished before the memory goes."""
    group = dist.new_group(timeout=LONG)
    x = torch.ones(3_000_000)
    if rank == 0:
        thread = threading.Thread(target=lambda: dist.all_reduce(x, group=group))
        thread.start()
        time.sleep(0.2)
        dist.barrier()
        backend_of(group).shutdown()
        thread.join()
    else:
        dist.barrier()
        time.sleep(0.3)
        dist.all_reduce(x, group=group)
    dist.barrier()
    dist.destroy_process_group(group)
    return float(x.unique().item())


def destroy_in_a_forked_child(rank: int, size: int) -> float:
    """The child has a copy of the group, and none of its threads; the parent's ranks go on."""
    group = dist.new_group(timeout=timedelta(seconds=20))
    x = torch.ones(100_000)
    dist.all_reduce(x, group=group, async_op=True).wait(timedelta(seconds=20))  # by the lane's own thread
    if rank == 0:
        child = os.fork()
        if child == 0:
            backend_of(group).shutdown()
            os._exit(0)
        deadline = time.monotonic() + 20
        while (status := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
            time.sleep(0.01)
        if status == (0, 0):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        assert status == (child, 0), "the child did not end"
    dist.barrier()
    time.sleep(0.3 if rank == 0 else 0.0)  # long enough for the others to look whether it has left
    dist.all_reduce(x, group=group)
    return float(x.unique().item())


def reduce_what_a_leader_cannot(rank: int, size: int) -> list[str]:
    """A mean of integers is refused by all, and harms nobody; what gloo refuses between leaders reaches those behind them."""
    mean = said_or_refused(lambda: dist.all_reduce(torch.ones(4, dtype=torch.int64), dist.ReduceOp.AVG))
    x = torch.ones(4)
    dist.all_reduce(x)
    assert x.tolist() == [float(size)] * 4
    return [mean, error_of(lambda: dist.all_reduce(torch.ones(4, dtype=torch.int16)))]


def said_or_refused(call: Callable[[], object]) -> str:
    try:
        return error_of(call)
    except ValueError as error:
        return str(error)
