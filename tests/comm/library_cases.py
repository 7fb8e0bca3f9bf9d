"""What torch builds on its collectives: DTensor, tensor parallelism, hooks of DDP, sharded checkpoints, pipelines.

Every rank of a job runs them, on gloo and on ccl; each compares with one process that does everything.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh


def _network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 6))


def _batch(rows: int) -> Tensor:
    return torch.randn(rows, 12, generator=torch.Generator().manual_seed(1))


def dtensors(rank: int, size: int) -> None:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (size,))
    whole = torch.arange(35.0).view(7, 5)  # not divisible by the number of ranks
    for first in (Shard(0), Shard(1), Replicate()):
        for second in (Shard(0), Shard(1), Replicate()):
            moved = distribute_tensor(whole, mesh, [first]).redistribute(placements=[second])
            assert torch.equal(moved.full_tensor(), whole), (first, second)
    product = distribute_tensor(whole, mesh, [Shard(0)]) @ distribute_tensor(whole.t(), mesh, [Replicate()])
    assert torch.equal(product.full_tensor(), whole @ whole.t())
    partial = DTensor.from_local(torch.full((4, 4), float(rank + 1)), mesh, [Partial()])
    assert partial.redistribute(placements=[Shard(0)]).full_tensor().unique().tolist() == [sum(range(1, size + 1))]


def tensor_parallelism(rank: int, size: int) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    alone = _network()
    split = parallelize_module(
        _network(), init_device_mesh("cpu", (size,)), {"0": ColwiseParallel(), "2": RowwiseParallel()}
    )
    x = _batch(5)
    torch.testing.assert_close(split(x), alone(x))
    split(x).square().sum().backward()
    alone(x).square().sum().backward()
    for got, want in zip(split.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(got.grad.full_tensor(), want.grad)  # type: ignore[union-attr]


def hooks_of_ddp(rank: int, size: int) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    alone = _network()
    x = _batch(4 * size)
    alone(x).square().mean().backward()
    state: Any = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=8, start_powerSGD_iter=2)
    for hook, given, tolerance in (
        (default_hooks.allreduce_hook, None, 1e-6),
        (default_hooks.fp16_compress_hook, None, 2e-3),
        (powerSGD_hook.powerSGD_hook, state, 1e-6),  # the first steps are plain
    ):
        model = nn.parallel.DistributedDataParallel(_network())
        model.register_comm_hook(given, hook)
        model(x[rank * 4 : (rank + 1) * 4]).square().mean().backward()
        for got, want in zip(model.module.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(got.grad, want.grad, atol=tolerance, rtol=tolerance)


def sharded_checkpoints(rank: int, size: int, directory: str) -> None:
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (size,))
    saved, loaded = _network(), _network(seed=5)
    for model in (saved, loaded):
        fully_shard(model, mesh=mesh)
    checkpoint.save(get_model_state_dict(saved), checkpoint_id=directory)
    state = get_model_state_dict(loaded)
    checkpoint.load(state, checkpoint_id=directory)
    set_model_state_dict(loaded, state)
    for got, want in zip(loaded.parameters(), _network().parameters(), strict=True):
        assert torch.equal(got.full_tensor(), want)  # type: ignore[attr-defined]


def pipelines(rank: int, size: int) -> None:
    """Each rank has one layer; batches go forward in parts, and gradients back, as messages between neighbours."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    def layer(number: int) -> nn.Module:
        torch.manual_seed(number)
        return nn.Sequential(nn.Linear(16, 16), nn.Tanh())

    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    target = torch.zeros(8, 16)
    alone = nn.Sequential(*(layer(number) for number in range(size)))
    loss = nn.functional.mse_loss(alone(x), target)
    loss.backward()
    for schedule in (ScheduleGPipe, Schedule1F1B):
        own = layer(rank)
        stage = PipelineStage(own, rank, size, torch.device("cpu"))
        losses: list[Tensor] = []
        run = schedule(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
        if rank == 0:
            run.step(x) if size > 1 else run.step(x, target=target, losses=losses)
        elif rank == size - 1:
            run.step(target=target, losses=losses)
            torch.testing.assert_close(torch.stack(losses).mean(), loss.detach())
        else:
            run.step()
        for got, want in zip(own.parameters(), alone[rank].parameters(), strict=True):
            torch.testing.assert_close(got.grad, want.grad)
    dist.barrier()
