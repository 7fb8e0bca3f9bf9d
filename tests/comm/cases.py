"""What c10d promises of its collectives, one function per promise. Every rank of a job runs them, on gloo and on ccl.

Values are small integers, whose sums are exact in every type, so results are compared for equality.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

DTYPES = ["float32", "float64", "bfloat16", "float16", "int8", "uint8", "int32", "int64"]
SIZES = [0, 1, 7, 1000, 8193, 300_001]  # zero, one, an odd number, few, one more than a block, several pieces


def values(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    return ((torch.arange(count) + rank) % 3 + 1).to(dtype)


def expected(op: str, size: int, count: int, dtype: torch.dtype) -> Tensor:
    stack = torch.stack([values(rank, count, torch.float64) for rank in range(size)])
    result = {
        "SUM": lambda: stack.sum(0),
        "AVG": lambda: stack.sum(0) / size,
        "MIN": lambda: stack.amin(0),
        "MAX": lambda: stack.amax(0),
        "PRODUCT": lambda: stack.prod(0),
    }[op]()
    return result.to(dtype)


def allreduce(rank: int, size: int, op: str, dtype: str) -> None:
    kind = getattr(torch, dtype)
    for count in SIZES:
        x = values(rank, count, kind)
        dist.all_reduce(x, getattr(dist.ReduceOp, op))
        assert torch.equal(x, expected(op, size, count, kind)), (count, x, expected(op, size, count, kind))


def allreduce_bool(rank: int, size: int) -> None:
    for op, want in (("SUM", [True, True, False]), ("MAX", [True, True, False]), ("MIN", [True, False, False])):
        x = torch.tensor([True, rank == 0, False])
        dist.all_reduce(x, getattr(dist.ReduceOp, op))
        assert x.tolist() == want, (op, x)


def allreduce_bits(rank: int, size: int) -> None:
    for op, want in (("BOR", 2**size - 1), ("BAND", 0), ("BXOR", 2**size - 1)):
        x = torch.full((3,), 2**rank, dtype=torch.int32)
        dist.all_reduce(x, getattr(dist.ReduceOp, op))
        assert x.tolist() == [want] * 3, (op, x)


def allreduce_of_transposed_memory(rank: int, size: int) -> None:
    x = torch.arange(12.0).view(3, 4).t()
    before = x.clone()
    dist.all_reduce(x)
    assert torch.equal(x, before * size)


def allreduce_is_the_same_on_all_ranks(rank: int, size: int) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for count in (1000, 200_003):
            generator = torch.Generator().manual_seed(rank)
            x = torch.randn(count, generator=generator).to(dtype)
            dist.all_reduce(x)
            everyone = [torch.empty_like(x) for _ in range(size)]
            dist.all_gather(everyone, x)
            assert all(torch.equal(other, x) for other in everyone)


def low_precision_sums_round_once(rank: int, size: int) -> None:
    # 256 + 1 is 256 in bf16: rounding after every rank would lose every 1.
    x = torch.tensor([256.0 if rank == 0 else 1.0] * 70_000, dtype=torch.bfloat16)
    dist.all_reduce(x)
    assert x.float().unique().tolist() == [torch.tensor(256.0 + size - 1).bfloat16().item()]


def nan_and_infinity_come_through(rank: int, size: int) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for op in ("SUM", "MAX", "MIN"):
            x = torch.tensor([float("nan") if rank == size - 1 else 1.0, 2.0], dtype=dtype)
            dist.all_reduce(x, getattr(dist.ReduceOp, op))
            assert x[0].isnan(), (dtype, op, x)
            assert not x[1].isnan()
        x = torch.tensor([float("inf") if rank == 0 else 1.0, 6e-8], dtype=dtype)
        dist.all_reduce(x)
        assert x[0].isinf()
        assert x[1] > 0


def allreduce_coalesced(rank: int, size: int) -> None:
    tensors = [values(rank, count, torch.float32) for count in (3, 1000, 70_000)]
    dist.all_reduce_coalesced(tensors)
    for x in tensors:
        assert torch.equal(x, expected("SUM", size, x.numel(), torch.float32))


def broadcast(rank: int, size: int, dtype: str) -> None:
    for root in range(size):
        for count in SIZES:
            x = values(rank, count, getattr(torch, dtype))
            dist.broadcast(x, root)
            assert torch.equal(x, values(root, count, x.dtype))


def reduce(rank: int, size: int) -> None:
    for root in range(size):
        for count in SIZES:
            x = values(rank, count, torch.float32)
            dist.reduce(x, root)
            if rank == root:
                assert torch.equal(x, expected("SUM", size, count, torch.float32))


def allgather(rank: int, size: int, dtype: str) -> None:
    kind = getattr(torch, dtype)
    for count in SIZES:
        out = [torch.empty(count, dtype=kind) for _ in range(size)]
        dist.all_gather(out, values(rank, count, kind))
        single = torch.empty(count * size, dtype=kind)
        dist.all_gather_into_tensor(single, values(rank, count, kind))
        for other in range(size):
            assert torch.equal(out[other], values(other, count, kind))
            assert torch.equal(single[other * count : (other + 1) * count], values(other, count, kind))


def allgather_uneven(rank: int, size: int) -> None:
    for base in (1, 50_000, 300_000):
        out = [torch.empty(base * (other + 1)) for other in range(size)]
        dist.all_gather(out, values(rank, base * (rank + 1), torch.float32))
        for other in range(size):
            assert torch.equal(out[other], values(other, base * (other + 1), torch.float32))


def allgather_coalesced(rank: int, size: int) -> None:
    counts = (1, 1000, 70_000)
    out = [[torch.empty(count) for count in counts] for _ in range(size)]
    dist.all_gather_coalesced(out, [values(rank, count, torch.float32) for count in counts])
    for other in range(size):
        for got, count in zip(out[other], counts, strict=True):
            assert torch.equal(got, values(other, count, torch.float32))


def complex_numbers(rank: int, size: int) -> None:
    x = torch.complex(values(rank, 1000, torch.float32), values(rank + 1, 1000, torch.float32))
    want = torch.stack([values(other, 1000, torch.float32) for other in range(size)]).sum(0)
    total = x.clone()
    dist.reduce(total, 0)
    assert rank != 0 or torch.equal(total.real, want)
    total = x.clone()
    group: Any = dist.group.WORLD
    group.allreduce([total]).wait()
    assert torch.equal(total.real, want)
    out = torch.empty(1000, dtype=torch.complex64)
    dist.reduce_scatter(out, [x.clone() for _ in range(size)])
    assert torch.equal(out.real, want)


def reduce_scatter(rank: int, size: int) -> None:
    for count in SIZES:
        parts = [values(rank + other, count, torch.float32) for other in range(size)]
        want = torch.stack([values(other + rank, count, torch.float32) for other in range(size)]).sum(0)
        out = torch.empty(count)
        dist.reduce_scatter(out, parts)
        assert torch.equal(out, want)
        out = torch.empty(count)
        dist.reduce_scatter_tensor(out, torch.cat(parts))
        assert torch.equal(out, want)


def averages_between_hosts(rank: int, size: int) -> None:
    """Between hosts gloo may do the reduction, and it has no AVG."""
    mean = sum(range(size)) / size
    x = torch.full((5,), float(rank))
    dist.reduce(x, 1, dist.ReduceOp.AVG)
    assert rank != 1 or x.tolist() == [mean] * 5
    out = torch.empty(3)
    dist.reduce_scatter(out, [torch.full((3,), float(rank + other)) for other in range(size)], dist.ReduceOp.AVG)
    assert out.tolist() == [mean + rank] * 3
    work = dist.reduce_scatter_tensor(out, torch.full((3 * size,), float(rank)), dist.ReduceOp.AVG, async_op=True)
    work.wait()
    assert out.tolist() == [mean] * 3


def alltoall(rank: int, size: int) -> None:
    for count in (1, 1000, 200_000):
        sent = [values(rank * size + other, count, torch.float32) for other in range(size)]
        got = [torch.empty(count) for _ in range(size)]
        dist.all_to_all(got, sent)
        for other in range(size):
            assert torch.equal(got[other], values(other * size + rank, count, torch.float32))


def alltoall_single(rank: int, size: int) -> None:
    dist.all_to_all_single(torch.empty(0), torch.empty(0))
    count = 5
    got = torch.empty(size * count)
    dist.all_to_all_single(got, torch.cat([values(rank + other, count, torch.float32) for other in range(size)]))
    assert torch.equal(got, torch.cat([values(other + rank, count, torch.float32) for other in range(size)]))
    for scale in (1, 90_000):  # uneven: rank r sends (r + q) * scale rows to q
        splits = [(rank + other) * scale for other in range(size)]
        sent = torch.cat([values(rank + 2 * other, length, torch.float32) for other, length in enumerate(splits)])
        got = torch.empty(sum(splits))
        dist.all_to_all_single(got, sent, splits, splits)
        want = [values(other + 2 * rank, length, torch.float32) for other, length in enumerate(splits)]
        assert torch.equal(got, torch.cat(want))


def gather(rank: int, size: int) -> None:
    for root in range(size):
        for count in SIZES[1:]:
            out = [torch.empty(count) for _ in range(size)] if rank == root else None
            dist.gather(values(rank, count, torch.float32), out, root)
            for other, x in enumerate(out or []):
                assert torch.equal(x, values(other, count, torch.float32))


def scatter(rank: int, size: int) -> None:
    for root in range(size):
        for count in SIZES[1:]:
            parts = [values(root + other, count, torch.float32) for other in range(size)] if rank == root else None
            out = torch.empty(count)
            dist.scatter(out, parts, root)
            assert torch.equal(out, values(root + rank, count, torch.float32))


def barrier(rank: int, size: int) -> None:
    for _ in range(50):
        dist.barrier()


def send_and_receive(rank: int, size: int) -> None:
    for count in (1, 1000, 400_000):
        if rank == 0:
            for other in range(1, size):
                dist.send(values(other, count, torch.float32), other)
        else:
            x = torch.empty(count)
            assert dist.recv(x, 0) == 0
            assert torch.equal(x, values(rank, count, torch.float32))


def exchange_in_a_ring(rank: int, size: int) -> None:
    # All ranks send before they receive: a backend whose send blocks would hang.
    right, left = (rank + 1) % size, (rank - 1) % size
    sent, got = values(rank, 500_000, torch.float32), torch.empty(500_000)
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, right), dist.P2POp(dist.irecv, got, left)])
    for work in works:
        work.wait()
    assert torch.equal(got, values(left, 500_000, torch.float32))


def tags_keep_messages_apart(rank: int, size: int) -> None:
    if rank == 0:
        works = [dist.isend(torch.full((3,), float(tag)), 1, tag=tag) for tag in (1, 2)]
        for work in works:
            work.wait()
    elif rank == 1:
        for tag in (2, 1):
            x = torch.empty(3)
            dist.recv(x, 0, tag=tag)
            assert x.tolist() == [tag] * 3


def messages_wait_for_their_tag(rank: int, size: int) -> None:
    """Hundreds of messages, larger together than the pipe between two ranks, received in reverse order."""
    tags = range(1000, 1300)
    if rank == 0:
        works = [dist.isend(torch.full((2000,), float(tag)), 1, tag=tag) for tag in tags]
        for work in works:
            work.wait()
    elif rank == 1:
        x = torch.empty(2000)
        for tag in reversed(tags):
            dist.recv(x, 0, tag=tag)
            assert x.unique().tolist() == [tag]


def messages_of_one_tag_keep_their_order(rank: int, size: int) -> None:
    if rank == 0:
        for number in range(20):
            dist.send(torch.full((number * 5000,), float(number)), 1, tag=7)
    elif rank == 1:
        received = [torch.empty(number * 5000) for number in range(20)]
        works = [dist.irecv(x, 0, tag=7) for x in received]
        for number, (x, work) in enumerate(zip(received, works, strict=True)):
            work.wait()
            assert x.tolist() == [float(number)] * (number * 5000)


def receive_from_any_source(rank: int, size: int) -> None:
    dist.barrier()
    if rank == 0:
        x, sources = torch.empty(3), set()
        for _ in range(size - 1):
            source = dist.recv(x, tag=9)
            assert x.tolist() == [float(source)] * 3
            sources.add(source)
        assert sources == set(range(1, size))
    else:
        dist.send(torch.full((3,), float(rank)), 0, tag=9)
    dist.barrier()


def receive_from_any_source_after_a_rank_has_left(rank: int, size: int) -> None:
    """A rank that has destroyed its group is no reason to stop waiting for the others."""
    group = dist.new_group()
    x = torch.empty(3)
    if rank == 1:
        dist.send(x.fill_(1), 0, group=group)
        dist.destroy_process_group(group)
    elif rank == 0:
        assert dist.recv(x, group=group) == 1
    dist.barrier()
    if rank == 0:
        later = [dist.irecv(torch.empty(3), group=group) for _ in range(size - 2)]
        time.sleep(0.2)  # long enough to notice that rank 1 is gone
        dist.barrier()
        for work in later:
            work.wait()
    else:
        dist.barrier()
        if rank > 1:
            dist.send(x, 0, group=group)
    dist.barrier()


def messages_use_no_thread_and_no_memory_per_tag(rank: int, size: int) -> None:
    """The second hundred of tags finds everything there, except for the group's thread if no message had to wait before."""

    def usage() -> tuple[int, int]:
        with open("/proc/self/status") as status:
            threads = next(int(line.split()[1]) for line in status if line.startswith("Threads:"))
        with open("/proc/self/maps") as maps:
            return threads, sum("stoker" in line for line in maps)

    x, before = torch.ones(100), (0, 0)
    for tag in range(200):
        _ = dist.send(x, 1, tag=tag) if rank == 0 else dist.recv(x, 0, tag=tag) if rank == 1 else None
        if tag == 99:
            before = usage()
    threads, segments = usage()  # threads of an earlier case may end only now
    assert threads <= before[0] + 1, (threads, before)
    assert segments <= before[1], (segments, before)


def sequence_numbers(rank: int, size: int) -> None:
    """All ranks have counted the same collectives; messages are not counted, since only two ranks know of them."""
    group = dist.new_group()
    backend = group._get_backend(
        torch.device("cpu")
    )  # the group itself passes the question on to torch's own backends only
    start = backend._get_sequence_number_for_group()
    for _ in range(3):
        dist.all_reduce(torch.ones(2), group=group)
    dist.barrier(group=group)
    if rank < 2:
        _ = dist.send(torch.ones(1), 1, group=group) if rank == 0 else dist.recv(torch.ones(1), 0, group=group)
    numbers: list[object] = [None] * size
    dist.all_gather_object(numbers, backend._get_sequence_number_for_group() - start)
    assert len(set(numbers)) == 1
    assert numbers[0] >= 4  # type: ignore[operator]


def detailed_debugging(rank: int, size: int) -> None:
    """TORCH_DISTRIBUTED_DEBUG=DETAIL: torch compares the collectives of all ranks before it starts them."""
    before = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        group = dist.new_group()
        x = torch.ones(3)
        dist.all_reduce(x, group=group)
        dist.barrier(group=group)
        assert x.tolist() == [float(size)] * 3
        try:
            dist.all_reduce(torch.ones(3 + rank), group=group)
            found = "no error"
        except RuntimeError as error:
            found = str(error)
        assert "Detected mismatch between collectives" in found
    finally:
        dist.set_debug_level(before)


def sparse_allreduce(rank: int, size: int) -> None:
    """Ranks share some rows, have some alone, and one has none; rows are vectors, as in the gradient of an embedding."""
    rows = [] if rank == 1 else [rank, 5, 5]
    x = torch.sparse_coo_tensor(
        torch.tensor([rows], dtype=torch.int64), torch.full((len(rows), 4), float(rank + 1)), (8, 4)
    )
    want = torch.zeros(8, 4)
    for other in range(size):
        for row in [] if other == 1 else [other, 5, 5]:
            want[row] += other + 1
    dist.all_reduce(x)
    assert x.is_sparse
    assert torch.equal(x.to_dense(), want)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Embedding(10, 3, sparse=True))
    model(torch.tensor([rank, 9])).sum().backward()
    gradient = model.module.weight.grad
    assert gradient.is_sparse
    torch.testing.assert_close(gradient.to_dense()[9], torch.ones(3))
    torch.testing.assert_close(gradient.to_dense()[rank], torch.full((3,), 1.0 / size))


def several_tensors(rank: int, size: int) -> None:
    """The tensors of one call are contributions to one result; the methods of a group take them, the functions of dist do not."""
    group: Any = dist.group.WORLD
    for op, want in (("SUM", sum(range(2 * size))), ("MAX", 2 * size - 1), ("PRODUCT", 0)):
        pair = [torch.full((3,), 2.0 * rank), torch.full((3,), 2.0 * rank + 1)]
        options = dist.AllreduceOptions()
        options.reduceOp = getattr(dist.ReduceOp, op)
        group.allreduce(pair, options).wait()
        assert [x.tolist() for x in pair] == [[float(want)] * 3] * 2
    pair = [torch.full((3,), 2.0 * rank), torch.full((3,), 2.0 * rank + 1)]
    choice = dist.BroadcastOptions()
    choice.rootRank, choice.rootTensor = 1, 1
    group.broadcast(pair, choice).wait()
    assert [x.tolist() for x in pair] == [[3.0] * 3] * 2
    lists = [[torch.zeros(1) for _ in range(2 * size)] for _ in range(2)]
    inputs = [torch.tensor([2.0 * rank]), torch.tensor([2.0 * rank + 1])]
    for found in (group.allgather(lists, inputs).get_future().wait(), lists):
        assert [[x.item() for x in one] for one in found] == [[float(i) for i in range(2 * size)]] * 2


def aliased_tensors(rank: int, size: int) -> None:
    """Each tensor of a list is reduced as it was before the call, also where two share memory."""
    x = torch.ones(4)
    dist.all_reduce_coalesced([x, x])
    assert x.tolist() == [float(size)] * 4
    y = torch.ones(6)
    dist.all_reduce_coalesced([y[:4], y[2:]])
    assert y.tolist() == [float(size)] * 6


def gather_has_a_future(rank: int, size: int) -> None:
    group: Any = dist.group.WORLD
    for root in range(size):
        options = dist.GatherOptions()
        options.rootRank = root
        out = [[torch.empty(2) for _ in range(size)]] if rank == root else []
        found = group.gather(out, [torch.full((2,), float(rank))], options).get_future().wait()
        if rank == root:
            assert [x.tolist() for x in found] == [[float(other)] * 2 for other in range(size)]


def inference_tensors(rank: int, size: int) -> None:
    with torch.inference_mode():
        x = torch.full((2, 3), float(rank)).t()  # not contiguous: the result is copied back
        dist.all_reduce(x)
        assert x.unique().tolist() == [float(sum(range(size)))]


def objects(rank: int, size: int) -> None:
    out: list[object] = [None] * size
    dist.all_gather_object(out, {"rank": rank, "text": "x" * rank * 1000})
    assert [item["rank"] for item in out] == list(range(size))  # type: ignore[index]
    box = [rank] * 2
    dist.broadcast_object_list(box, src=size - 1)
    assert box == [size - 1] * 2


def sub_groups(rank: int, size: int) -> None:
    groups = [dist.new_group([a, b]) for a in range(size) for b in range(a + 1, size)]
    pairs = [(a, b) for a in range(size) for b in range(a + 1, size)]
    for group, pair in zip(groups, pairs, strict=True):
        if rank in pair:
            x = torch.full((100_000,), float(rank))
            dist.all_reduce(x, group=group)
            assert x.unique().tolist() == [float(sum(pair))]
            y = torch.full((3,), float(rank))
            dist.broadcast(y, pair[1], group=group)
            assert y.tolist() == [float(pair[1])] * 3
    dist.barrier()
    for group, pair in zip(groups, pairs, strict=True):
        if rank in pair:
            dist.destroy_process_group(group)


def async_work(rank: int, size: int) -> None:
    tensors = [torch.full((50_000,), float(rank + i)) for i in range(8)]
    works = [dist.all_reduce(x, async_op=True) for x in tensors]
    for i, (x, work) in reversed(list(enumerate(zip(tensors, works, strict=True)))):
        work.wait()
        assert work.is_completed()
        assert x[0].item() == sum(range(size)) + i * size


def futures(rank: int, size: int) -> None:
    x = torch.full((4,), float(rank))
    work = dist.all_reduce(x, async_op=True)
    called = threading.Event()

    def note(future: torch.futures.Future[list[Tensor]]) -> Tensor:
        called.set()
        return future.value()[0] * 2

    doubled = work.get_future().then(note).wait()
    assert called.is_set()
    again = dist.all_reduce(torch.ones(4), async_op=True)
    assert again.get_future().then(lambda _: again.get_future().done()).wait()  # a callback may ask for the future
    assert doubled.tolist() == [2.0 * sum(range(size))] * 4


def callbacks_may_communicate(rank: int, size: int) -> None:
    """A callback runs in the communication thread, which must not wait for itself."""

    def again(future: torch.futures.Future[list[Tensor]]) -> Tensor:
        y = future.value()[0].clone()
        dist.all_reduce(y)
        return y

    for count in (4, 100_000):
        x = torch.full((count,), float(rank))
        twice = dist.all_reduce(x, async_op=True).get_future().then(again).wait()
        assert twice.unique().tolist() == [float(sum(range(size)) * size)]


def messages_from_many_threads(rank: int, size: int) -> None:
    failures: list[BaseException] = []

    def talk(first: int) -> None:
        try:
            for tag in range(100 + first, 140, 8):
                x = torch.full((3,), float(tag)) if rank == 0 else torch.zeros(3)
                _ = dist.send(x, 1, tag=tag) if rank == 0 else dist.recv(x, 0, tag=tag)
                assert x.tolist() == [tag] * 3
        except BaseException as error:
            failures.append(error)

    if rank < 2:
        threads = [threading.Thread(target=talk, args=(first,)) for first in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures, failures
    dist.barrier()


def async_order_is_free_between_groups(rank: int, size: int) -> None:
    # Rank 0 starts a collective in one group and then waits in another; the others do so in reverse order.
    first, second = dist.new_group(), dist.new_group()
    x, y = torch.ones(10), torch.ones(10)
    if rank == 0:
        work = dist.all_reduce(x, group=first, async_op=True)
        dist.all_reduce(y, group=second)
    else:
        work = dist.all_reduce(y, group=second, async_op=True)
        dist.all_reduce(x, group=first)
    work.wait()
    assert x.tolist() == y.tolist() == [float(size)] * 10


def data_parallel(rank: int, size: int) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 300), torch.nn.ReLU(), torch.nn.Linear(300, 4))
    torch.manual_seed(0)
    alone = torch.nn.Sequential(torch.nn.Linear(20, 300), torch.nn.ReLU(), torch.nn.Linear(300, 4))
    parallel = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.01)  # type: ignore[arg-type]
    x = torch.randn(8 * size, 20, generator=torch.Generator().manual_seed(1))
    mine = x[rank * 8 : (rank + 1) * 8]
    for accumulate in (True, False):
        if accumulate:
            with parallel.no_sync():
                parallel(mine).square().mean().backward()
        else:
            parallel(mine).square().mean().backward()
        alone(x).square().mean().backward()
    for got, want in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad)


def sharded_parallel(rank: int, size: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
    torch.manual_seed(0)
    alone = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
    fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    x = torch.randn(4 * size, 16, generator=torch.Generator().manual_seed(1))
    for net, batch in ((model, x[rank * 4 : (rank + 1) * 4]), (alone, x)):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            net(batch).square().mean().backward()
            optimizer.step()
    for got, want in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(got.full_tensor(), want)  # type: ignore[attr-defined]


def zero_optimizer(rank: int, size: int) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(50, 50))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.full((4, 50), float(rank))).square().mean().backward()
        optimizer.step()
    weights = model.module.weight.detach().clone()
    dist.broadcast(weights, 0)
    assert torch.equal(weights, model.module.weight)


def functional_collectives(rank: int, size: int) -> None:
    import torch.distributed._functional_collectives as functional

    group = dist.group.WORLD
    x = functional.all_reduce(torch.full((6,), float(rank + 1)), "sum", group)
    assert x.tolist() == [float(sum(range(1, size + 1)))] * 6
    y = functional.all_gather_tensor(torch.full((2,), float(rank)), 0, group)
    assert y.tolist() == [float(other) for other in range(size) for _ in range(2)]
    z = functional.reduce_scatter_tensor(torch.arange(float(size)), "sum", 0, group)
    assert z.tolist() == [float(rank * size)]


def error_of_compressed_gradients(rank: int, size: int, name: str) -> float:
    """How far the sum of twenty compressed gradients is from that of plain ones, relative to its size."""
    from stoker.distributed.compression import compress_gradients

    torch.manual_seed(0)
    plain, small = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
    small.load_state_dict(plain.state_dict())
    models = [torch.nn.parallel.DistributedDataParallel(model) for model in (plain, small)]
    compress_gradients(models[1], name)
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(rank))
    total = [torch.zeros(64, 64), torch.zeros(64, 64)]
    for _ in range(20):
        for i, model in enumerate(models):
            model.zero_grad()
            model(x).square().mean().backward()
            total[i] += model.module.weight.grad
    return ((total[1] - total[0]).norm() / total[0].norm()).item()


def feedback_follows_reordered_parameters(rank: int, size: int) -> None:
    """DDP may reorder the parameters of a bucket after the first step without changing its size."""
    from types import SimpleNamespace

    from stoker.distributed.compression import Bf16Hook

    a, b = torch.randn(2, 100, generator=torch.Generator().manual_seed(rank)).unbind()

    def reduced(hook: Bf16Hook, *parameters: Tensor) -> Tensor:
        gradient = torch.cat(parameters)
        bucket: Any = SimpleNamespace(index=lambda: 0, buffer=lambda: gradient, parameters=lambda: list(parameters))
        return hook(None, bucket).wait()

    kept, plain = Bf16Hook(feedback=True), Bf16Hook()
    reduced(kept, a, b)
    assert torch.equal(reduced(kept, b, a), reduced(plain, b, a))
    assert not torch.equal(reduced(kept, b, a), reduced(plain, b, a))


def feedback_drops_values_that_are_not_finite(rank: int, size: int) -> None:
    """A gradient that overflowed must not affect the next ones."""
    from types import SimpleNamespace

    from stoker.distributed.compression import Bf16Hook

    hook, parameter = Bf16Hook(feedback=True), torch.zeros(3)

    def reduced(*numbers: float) -> Tensor:
        gradient = torch.tensor(numbers)
        bucket: Any = SimpleNamespace(index=lambda: 0, buffer=lambda: gradient, parameters=lambda: [parameter])
        return hook(None, bucket).wait()

    assert not reduced(float("nan"), float("inf"), 1.0).isfinite()[:2].any()
    assert reduced(1.0, 2.0, 3.0).tolist() == [1.0, 2.0, 3.0]


def local_sgd_follows_the_first_rank(rank: int, size: int) -> None:
    """Ranks whose checkpoint differs, or is missing, take the state of rank 0."""
    from stoker.distributed.local_sgd import LocalSGD

    model = torch.nn.Linear(1, 1)
    local = LocalSGD(model, every=2, outer_lr=0.7, outer_momentum=0.9)
    start = model.weight.detach().clone()
    state = local.state_dict()
    if rank == 0:
        local.load_state_dict({**state, "steps": 5, "velocity": [torch.full_like(v, 0.5) for v in state["velocity"]]})
    else:
        local.load_state_dict({**state, "steps": rank, "anchor": [a + rank for a in state["anchor"]]})
    local.follow_first_rank()
    assert (local.steps, local.agreed) == (5, True)
    assert local.step()
    torch.testing.assert_close(model.weight.detach(), start - 0.7 * 0.9 * 0.9 * 0.5)


def local_sgd_averages_weights(rank: int, size: int) -> None:
    from stoker.distributed.local_sgd import LocalSGD

    model = torch.nn.Linear(3, 3)
    local = LocalSGD(model, every=2)
    start = model.weight.detach().clone()
    for step in range(2):
        with torch.no_grad():
            model.weight += rank + 1
        assert local.step() == (step == 1)
    torch.testing.assert_close(model.weight.detach(), start + 2 * sum(range(1, size + 1)) / size)


def local_sgd_averages_gradients_in_the_first_steps(rank: int, size: int) -> None:
    from stoker.distributed.local_sgd import LocalSGD

    model = torch.nn.Linear(2, 1)
    for dtype, error in ((None, 1e-6), (torch.bfloat16, 1e-2)):
        local = LocalSGD(model, every=2, warm_up=2, sent_dtype=dtype)
        for _ in range(2):
            assert local.warms_up
            model.weight.grad = torch.full_like(model.weight, rank + 1.0)
            model.bias.grad = torch.ones_like(model.bias) if rank == 0 else None
            local.average_gradients()
            torch.testing.assert_close(
                model.weight.grad, torch.full_like(model.weight, (size + 1) / 2), atol=error, rtol=0
            )
            torch.testing.assert_close(model.bias.grad, torch.full_like(model.bias, 1 / size), atol=error, rtol=0)
            with torch.no_grad():
                model.weight -= model.weight.grad
            assert local.step()
            assert local.agreed
        assert not local.warms_up
        start = model.weight.detach().clone()
        for step in range(2):
            with torch.no_grad():
                model.weight += rank + 1
            assert local.step() == (step == 1)
        torch.testing.assert_close(
            model.weight.detach(), start + 2 * sum(range(1, size + 1)) / size, atol=error, rtol=0
        )


def local_sgd_goes_on_with_another_momentum(rank: int, size: int) -> None:
    from stoker.distributed.local_sgd import LocalSGD

    model = torch.nn.Linear(1, 1)
    without, using = LocalSGD(model, 1), LocalSGD(model, 1, outer_momentum=0.9)
    with torch.no_grad():
        model.weight += 1.0
    without.step()
    weight = model.weight.item()
    using.load_state_dict(without.state_dict())
    assert using.steps == 1
    using.step()  # the weights have not changed since, and there is no velocity yet
    assert model.weight.item() == weight
    without.load_state_dict(using.state_dict())
    assert without.steps == 2


def local_sgd_moves_on_with_momentum(rank: int, size: int) -> None:
    from stoker.distributed.local_sgd import LocalSGD

    model = torch.nn.Linear(1, 1)
    local = LocalSGD(model, every=1, outer_lr=0.5, outer_momentum=0.9)
    value, velocity = model.weight.item(), 0.0
    for _ in range(3):
        with torch.no_grad():
            model.weight += 1.0
        local.step()
        move = -1.0
        velocity = 0.9 * velocity + move
        value -= 0.5 * (move + 0.9 * velocity)
        assert abs(model.weight.item() - value) < 1e-5
