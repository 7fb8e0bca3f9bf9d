"""What a ccl group refuses, with a sentence and before it writes past a tensor's end; and that it works on afterwards.

Every call is wrong on every rank that makes it, so that no other rank waits.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

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


def root(rank: int) -> dist.BroadcastOptions:
    options = dist.BroadcastOptions()
    options.rootRank = rank
    return options


def tensors_that_do_not_fit(rank: int, size: int) -> None:
    short, long, many = torch.ones(4), torch.ones(100_000), torch.ones(100_000 * size)
    several, longs = [torch.zeros(4) for _ in range(size)], [torch.zeros(100_000) for _ in range(size)]
    alone, one_type = [torch.zeros(4)], "tensors must all have the same type"
    missing = f"list size 1. {{}} list size should be {size}"
    no_input, no_output = missing.format("Input"), missing.format("Output")
    group: Any = dist.group.WORLD._get_backend(torch.device("cpu"))  # without the checks of torch
    whole = torch.zeros(4, dtype=torch.int64)
    maximum = dist.AllreduceOptions()
    maximum.reduceOp = dist.ReduceOp.MAX
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: dist.all_gather(alone, short), no_output),
        (lambda: dist.all_gather(longs, short), "an input of 4 elements does not fit an output of 100000"),
        (lambda: dist.all_gather_into_tensor(many, short), "an input of 4 elements does not fit"),
        (lambda: dist.all_gather_into_tensor(torch.zeros(4 * size, dtype=torch.int64), short), one_type),
        (lambda: dist.reduce_scatter_tensor(short, many), "does not fit an output of 4"),
        (lambda: dist.reduce_scatter_tensor(whole, torch.ones(4 * size)), one_type),
        (lambda: dist.reduce_scatter(short, alone), no_input),
        (lambda: dist.all_to_all(alone, alone), no_input),
        (lambda: dist.all_to_all(several, longs), "an input of 100000 elements does not fit an output of 4"),
        (lambda: dist.all_to_all_single(short, torch.ones(size * 100_000), [4] + [0] * (size - 1)), "does not fit"),
        (lambda: dist.all_to_all_single(torch.ones(size + 1), torch.ones(size)), "cannot be divided among"),
        (lambda: dist.send(short, size), ""),
        (lambda: group.send([short], rank, 0), "to itself"),
        (lambda: group.recv([short], rank, 0), "from itself"),
        (lambda: group.send([short, short], 1 - min(rank, 1), 0), "requires a single-element input tensor list"),
        (lambda: dist.broadcast(short, size), f"invalid root rank {size}"),
        (lambda: dist.reduce(short, size), f"invalid root rank {size}"),
        (lambda: dist.gather(short, None, size), f"invalid root rank {size}"),
        (lambda: dist.scatter(short, None, size), f"invalid root rank {size}"),
        (lambda: group.broadcast([], root(0)), "invalid root tensor"),
        (lambda: group.broadcast([short, whole], root(0)), "invalid tensor type"),
        (lambda: group.broadcast([short, long], root(0)), "invalid tensor size"),
        (lambda: group.allreduce([]), "requires non-empty tensor list"),
        (lambda: group.allreduce([short, long]), "invalid tensor size"),
        (lambda: group.allreduce([torch.ones(3).to_sparse()], maximum), "unsupported reduction operation"),
        (lambda: group.allreduce_coalesced([]), "requires non-empty tensor list"),
        (lambda: group.allreduce_coalesced([short, short.to_sparse()]), "invalid tensor layout at index 1"),
        (lambda: group.reduce([short, short]), "requires a single-element tensor list"),
        (lambda: group.allgather([], []), "requires non-empty input tensor list"),
        (lambda: dist.all_gather_coalesced([alone], alone), "output lists should be equal to world size"),
        (lambda: dist.all_gather_coalesced([longs[:1]] * size, alone), "invalid size of output tensor at index 0"),
        (lambda: dist.all_gather_coalesced([[whole]] * size, alone), "invalid tensor type at index 0"),
    ]
    if rank == 0:
        calls += [
            (lambda: dist.gather(long, several, 0), "an input of 100000 elements does not fit an output of 4"),
            (lambda: dist.gather(short, alone, 0), no_output),
            (lambda: dist.scatter(short, alone, 0), no_input),
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
        refused(
            lambda: dist.recv(torch.ones(4), 0, tag=77), "rank 0 sent a message of 20 bytes with tag 77, and rank 1"
        )
    if rank == 0:
        dist.send(torch.ones(4), 1, tag=77)
    elif rank == 1:
        dist.recv(torch.ones(4), 0, tag=77)  # the message that did not fit is gone


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
        refused(lambda: work.wait(timedelta(seconds=0.1)), "timeout while rank 0 waited 0.1 s for an operation")
        dist.barrier()
        work.wait(timedelta(seconds=30))
    else:
        dist.barrier()
        dist.all_reduce(x, group=group)
    assert x.tolist() == [float(size)] * 3


def messages_that_never_come(rank: int, size: int) -> None:
    group = dist.new_group(timeout=timedelta(seconds=0.3))
    if rank == 0:
        waiting = "timeout after 0.3 s: rank 0 was waiting for a message from"
        refused(lambda: dist.recv(torch.ones(3), 1, group=group, tag=5), f"{waiting} rank 1 with tag 5")
        refused(lambda: dist.recv(torch.ones(3), group=group, tag=6), f"{waiting} any rank with tag 6")
    dist.barrier()
    if rank < 2:  # the group still works
        x = torch.ones(3) if rank == 1 else torch.zeros(3)
        _ = dist.recv(x, 1, group=group) if rank == 0 else dist.send(x, 0, group=group)
        assert x.tolist() == [1.0] * 3


def messages_from_nobody(rank: int, size: int) -> None:
    group = dist.new_group()
    if rank > 0:
        dist.destroy_process_group(group)
    else:
        refused(
            lambda: dist.recv(torch.ones(3), group=group), "all other ranks have left the group; rank 0 was waiting"
        )


def monitored_barrier(rank: int, size: int) -> None:
    """The method of a group; torch's function of this name takes gloo alone."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    group.monitored_barrier()
    if rank == 0:
        refused(
            group.monitored_barrier,
            "Rank 0 failed to pass monitoredBarrier: ccl: timeout while rank 0 waited 1 s in barrier",
        )
    dist.barrier()
