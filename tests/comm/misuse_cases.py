"""What a ccl group refuses, with a sentence and before it writes past a tensor's end; and that it works on afterwards.

Every call is wrong on every rank that makes it, so that no other rank waits.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist


def refused(call: Callable[[], object], reason: str) -> None:
    outcome = "accepted"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's new names for old functions
            call()
    except (ValueError, RuntimeError) as error:
        outcome = f"refused: {error}"
    assert outcome.startswith("refused")
    assert reason in outcome, outcome


def tensors_that_do_not_fit(rank: int, size: int) -> None:
    short, long, many = torch.ones(4), torch.ones(100_000), torch.ones(100_000 * size)
    several, longs = [torch.zeros(4) for _ in range(size)], [torch.zeros(100_000) for _ in range(size)]
    alone, one_type = [torch.zeros(4)], "all must have the same type"
    missing = f"a list of 1 tensors for a group of {size}"
    whole = torch.zeros(4, dtype=torch.int64)
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: dist.all_gather(alone, short), missing),
        (lambda: dist.all_gather(longs, short), "an input of 4 elements does not fit an output of 100000"),
        (lambda: dist.all_gather_into_tensor(many, short), "an input of 4 elements does not fit"),
        (lambda: dist.all_gather_into_tensor(torch.zeros(4 * size, dtype=torch.int64), short), one_type),
        (lambda: dist.reduce_scatter_tensor(short, many), "does not fit an output of 4"),
        (lambda: dist.reduce_scatter_tensor(whole, torch.ones(4 * size)), one_type),
        (lambda: dist.reduce_scatter(short, alone), missing),
        (lambda: dist.all_to_all(alone, alone), missing),
        (lambda: dist.all_to_all(several, longs), "an input of 100000 elements does not fit an output of 4"),
        (lambda: dist.all_to_all_single(short, torch.ones(size * 100_000), [4] + [0] * (size - 1)), "does not fit"),
        (lambda: dist.all_to_all_single(torch.ones(size + 1), torch.ones(size)), "cannot be divided among"),
        (lambda: dist.send(short, size), ""),
        (lambda: dist.recv(short), "pass src to recv"),
        (lambda: dist.broadcast(short, size), f"no rank {size} to be the root"),
        (lambda: dist.all_gather_coalesced([alone], alone), ""),
    ]
    if rank == 0:
        calls += [
            (lambda: dist.gather(long, several, 0), "an input of 100000 elements does not fit an output of 4"),
            (lambda: dist.gather(short, alone, 0), missing),
            (lambda: dist.scatter(short, alone, 0), missing),
            (lambda: dist.scatter(long, several, 0), "an input of 4 elements does not fit an output of 100000"),
        ]
    for call, reason in calls:
        refused(call, reason)
    x = torch.ones(3)
    dist.all_reduce(x)
    assert x.tolist() == [float(size)] * 3


def shares_that_others_do_not_expect(rank: int, size: int) -> None:
    group = dist.new_group()
    sent = [torch.ones(4 if rank == other else 4 + rank) for other in range(size)]
    got = [torch.zeros(4) for _ in range(size)]
    if rank == 0:
        refused(lambda: dist.all_to_all(got, sent, group=group), "rank 1 sends 20 bytes to rank 0, which expects 16")
    else:
        refused(lambda: dist.all_to_all(got, sent, group=group), "sends")


def messages_of_another_length(rank: int, size: int) -> None:
    if rank == 0:
        dist.send(torch.ones(5), 1, tag=77)
    elif rank == 1:
        refused(lambda: dist.recv(torch.ones(4), 0, tag=77), "rank 0 in message of 20 bytes from rank 0")


def groups_that_are_gone(rank: int, size: int) -> None:
    group = dist.new_group()
    work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
    dist.destroy_process_group(group)
    work.wait()
    calls: list[Callable[[], object]] = [
        lambda: group.allreduce([torch.ones(3)]),
        lambda: group.broadcast([torch.ones(3)]),
        lambda: group.barrier(),
        lambda: group.send([torch.ones(3)], 1 - rank if rank < 2 else 0, 0),
    ]
    for call in calls:
        refused(lambda call=call: call(), "destroyed")  # type: ignore[misc]


def waiting_has_a_limit_of_its_own(rank: int, size: int) -> None:
    group = dist.new_group()
    x = torch.ones(3)
    if rank == 0:
        work = dist.all_reduce(x, group=group, async_op=True)
        refused(lambda: work.wait(timedelta(seconds=0.1)), "waited 0.1 s for an operation")
        dist.barrier()
        work.wait(timedelta(seconds=30))
    else:
        dist.barrier()
        dist.all_reduce(x, group=group)
    assert x.tolist() == [float(size)] * 3
