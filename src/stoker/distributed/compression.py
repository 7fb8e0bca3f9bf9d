"""Gradient compression, selected by name: bf16 with or without error feedback, and PyTorch's PowerSGD.

ccl adds bf16 in fp32 and rounds once. With error feedback a rank keeps the rounding error of its gradient and adds it to the next
one; the rounding error of the sum is lost.
"""

# No `from __future__ import annotations` here: DDP compares the annotations of a hook with the types themselves.
from typing import Any

import torch
import torch.distributed as dist

from stoker.distributed.settings import COMPRESSIONS

__all__ = ["COMPRESSIONS", "Bf16Hook", "compress_gradients"]

# PyTorch's default of 1,000 steps before PowerSGD starts would be a whole fine-tuning run; the paper needs a few steps.
_POWERSGD_FROM_STEP = 10


class Bf16Hook:
    """A DDP communication hook that sends gradients as bf16. It keeps the rounding errors if `feedback` is set."""

    def __init__(self, group: Any = None, *, feedback: bool = False) -> None:
        self._group = group
        self._feedback = feedback
        self._errors: dict[int, tuple[tuple[int, ...], torch.Tensor]] = {}
        self.__name__ = self.__qualname__ = "stoker_bf16"  # DDP logs the name of the hook

    def __call__(self, state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        gradient = bucket.buffer()
        group = self._group if self._group is not None else dist.group.WORLD
        ranks = dist.get_world_size(group)
        # DDP rebuilds its buckets after the first step, often with the same parameters in another order.
        order = tuple(parameter.data_ptr() for parameter in bucket.parameters()) if self._feedback else ()
        if self._feedback:
            known, error = self._errors.get(bucket.index(), ((), gradient))
            if known == order:
                gradient.add_(error)
        small = torch.div(gradient, ranks, out=torch.empty_like(gradient, dtype=torch.bfloat16))
        if self._feedback:
            # The error of a gradient that is not finite is dropped: NaN would stay in every later gradient.
            error = torch.sub(gradient, small, alpha=ranks).nan_to_num_(0.0, 0.0, 0.0)
            self._errors[bucket.index()] = (order, error)
        future = dist.all_reduce(small, group=group, async_op=True).get_future()

        def widen(done: torch.futures.Future[Any]) -> torch.Tensor:
            return gradient.copy_(done.value()[0])

        result: torch.futures.Future[torch.Tensor] = future.then(widen)
        return result


class _SynchronousGroup:
    """A process group whose allreduce is done when it returns.

    PyTorch's PowerSGD starts one allreduce within the callback of another and waits for it there. Callbacks run in the
    thread that communicates, which would then wait for itself. Operations that are already done run their callbacks at once.
    """

    def __init__(self, group: Any) -> None:
        self._group = group

    def size(self) -> int:
        return int(self._group.size())

    def allreduce(self, *args: Any, **named: Any) -> Any:
        work = self._group.allreduce(*args, **named)
        work.wait()
        return work


def compress_gradients(model: torch.nn.parallel.DistributedDataParallel, name: str, *, rank_of_matrix: int = 4) -> None:
    """Makes `model` compress its gradients by the method `name`, one of COMPRESSIONS. Call it once, before the first step."""
    if name not in COMPRESSIONS:
        raise ValueError(f"gradient compression {name!r} is unknown; choose one of {', '.join(COMPRESSIONS)}")
    if name.startswith("bf16"):
        model.register_comm_hook(None, Bf16Hook(model.process_group, feedback=name == "bf16-feedback"))
    elif name == "powersgd":
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

        state = powerSGD_hook.PowerSGDState(
            _SynchronousGroup(model.process_group),
            matrix_approximation_rank=rank_of_matrix,
            start_powerSGD_iter=_POWERSGD_FROM_STEP,
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
