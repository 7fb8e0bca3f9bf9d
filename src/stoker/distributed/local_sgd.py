"""Local SGD for slow networks: ranks train alone for some steps, then average their weights, with DiLoCo's outer optimizer.

Every `every` steps the ranks average the change of their weights since the last average, and an outer Nesterov step applies it to
the weights that all started from. With outer_lr 1 and outer_momentum 0 that is plain averaging of weights. In the first `warm_up`
steps gradients are averaged instead, as DDP does.
The model must not be wrapped in DDP: nothing is sent between the averages.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from stoker.distributed.settings import DistributedSettings, check_outer
from stoker.kernels.frozen_parameter import FrozenWeight

__all__ = ["LocalSGD"]

log = logging.getLogger("stoker")

_PIECE = 16 << 20  # elements sent at once: 64 MB, so that the next piece is prepared while the last is being sent


class LocalSGD:
    """Call `step()` after every optimizer step; it returns whether the ranks have just averaged."""

    def __init__(
        self,
        model: torch.nn.Module,
        every: int,
        *,
        outer_lr: float = 1.0,
        outer_momentum: float = 0.0,
        warm_up: int = 0,
        sent_dtype: torch.dtype | None = None,
        group: Any = None,
    ) -> None:
        """`sent_dtype`: the type in which changes are sent, torch.bfloat16 for half the bytes; None for the weights' own."""
        if every < 1:
            raise ValueError(f"every={every} must be at least 1 step")
        check_outer(outer_lr, outer_momentum)
        if warm_up < 0:
            raise ValueError(f"warm_up={warm_up} must be a number of steps, or 0 for none")
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            raise ValueError("LocalSGD takes the model itself, not DDP: DDP would average the gradients of every step")
        self.every = every
        self.outer_lr = outer_lr
        self.outer_momentum = outer_momentum
        self.warm_up = warm_up
        self.steps = 0
        self.waited = 0.0
        """Seconds the last average took, from this rank's arrival on."""
        self._averaged_at = 0
        self._sent_dtype = sent_dtype
        self._group = group
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        with torch.no_grad():
            # every rank has read the same files, and frozen weights in few bits are not sent
            for tensor in [*(p for p in model.parameters() if not isinstance(p, FrozenWeight)), *model.buffers()]:
                dist.broadcast(tensor.data, dist.get_global_rank(self._world, 0), group=group)
        self._anchor = [p.detach().clone() for p in self._parameters]
        self._velocity = [torch.zeros_like(p) for p in self._anchor] if outer_momentum else []

    @classmethod
    def from_settings(cls, model: torch.nn.Module, settings: DistributedSettings) -> LocalSGD:
        return cls(
            model,
            settings.local_sgd,
            outer_lr=settings.local_sgd_outer_lr,
            outer_momentum=settings.local_sgd_outer_momentum,
            warm_up=settings.local_sgd_warmup_steps,
            sent_dtype=torch.bfloat16 if settings.gradient_compression.startswith("bf16") else None,
        )

    @property
    def _world(self) -> Any:
        return self._group if self._group is not None else dist.group.WORLD

    @property
    def agreed(self) -> bool:
        """Whether all ranks hold the same weights: no step since the last average."""
        return self.steps == self._averaged_at

    @property
    def warms_up(self) -> bool:
        """Whether the step that is being taken averages gradients: call `average_gradients` after its backward pass."""
        return self.steps < self.warm_up

    def step(self, *, last: bool = False) -> bool:
        """`last`: the ranks average in any case, because training ends."""
        warmed_up = not self.warms_up
        self.steps += 1
        if not warmed_up:
            self._keep_weights()
            return True
        if (self.steps - self.warm_up) % self.every and not last:
            return False
        self.average()
        return True

    @torch.no_grad()
    def average_gradients(self) -> None:
        """What DDP does in the backward pass. To be called before gradients are clipped."""
        begin = time.perf_counter()
        ranks = dist.get_world_size(self._group)
        for parameter in self._parameters:
            if parameter.grad is None:  # in this rank's batch alone, perhaps
                parameter.grad = torch.zeros_like(parameter)
        sent = []
        for piece in _pieces(self._parameters):
            gradients: list[Any] = [self._parameters[i].grad for i in piece]
            flat = (
                torch.cat([one.reshape(-1) for one in gradients]).to(self._sent_dtype or gradients[0].dtype).div_(ranks)
            )
            sent.append((gradients, flat, dist.all_reduce(flat, group=self._group, async_op=True)))
        for gradients, flat, work in sent:
            work.wait()
            for gradient, mean in zip(gradients, flat.split([one.numel() for one in gradients]), strict=True):
                gradient.copy_(mean.view_as(gradient))
        self.waited = time.perf_counter() - begin

    @torch.no_grad()
    def average(self) -> None:
        """Averages now. To be called also at the end of training and before a checkpoint."""
        begin = time.perf_counter()
        ranks = dist.get_world_size(self._group)
        sent = [self._send(piece, ranks) for piece in _pieces(self._anchor)]
        for piece, move, work in sent:
            work.wait()
            at = 0
            for i in piece:
                anchor, parameter = self._anchor[i], self._parameters[i]
                mean = move[at : at + anchor.numel()].view_as(anchor).to(anchor.dtype)
                at += anchor.numel()
                if self.outer_momentum:
                    self._velocity[i].mul_(self.outer_momentum).add_(mean)
                    mean = mean.add(self._velocity[i], alpha=self.outer_momentum)
                anchor.sub_(mean, alpha=self.outer_lr)
                parameter.copy_(anchor)
        self._averaged_at = self.steps
        self.waited = time.perf_counter() - begin

    def _send(self, piece: Sequence[int], ranks: int) -> tuple[Sequence[int], torch.Tensor, Any]:
        """Starts to average the changes of some parameters, as one tensor."""
        anchors = [self._anchor[i] for i in piece]
        move = torch.empty(sum(a.numel() for a in anchors), dtype=self._sent_dtype or anchors[0].dtype)
        at = 0
        for i, anchor in zip(piece, anchors, strict=True):
            move[at : at + anchor.numel()] = (anchor - self._parameters[i]).div_(ranks).view(-1)
            at += anchor.numel()
        return piece, move, dist.all_reduce(move, group=self._group, async_op=True)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "anchor": self._anchor, "velocity": self._velocity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """If the outer momentum was turned on or off since the checkpoint, the velocity starts at zero or is dropped."""
        self.steps = self._averaged_at = state["steps"]
        kept = [(self._anchor, state["anchor"])]
        if bool(self._velocity) == bool(state["velocity"]):
            kept.append((self._velocity, state["velocity"]))
        else:
            done = "starts at zero" if self._velocity else "is dropped"
            log.warning("local_sgd: the checkpoint had another outer momentum; the velocity of the averages %s", done)
        for mine, theirs in kept:
            for tensor, saved in zip(mine, theirs, strict=True):
                tensor.copy_(saved)

    def restart_from_weights(self) -> None:
        """The weights were replaced by others, the same on all ranks: changes are counted from these."""
        self._keep_weights()
        for velocity in self._velocity:
            velocity.zero_()

    def _keep_weights(self) -> None:
        """All ranks have the same weights: changes are counted from these."""
        for anchor, parameter in zip(self._anchor, self._parameters, strict=True):
            anchor.copy_(parameter.detach())
        self._averaged_at = self.steps

    def follow_first_rank(self) -> None:
        """All ranks continue from the state of rank 0, whatever each has loaded from a checkpoint. Collective."""
        first = dist.get_global_rank(self._world, 0)
        steps = torch.tensor([self.steps])
        for tensor in [steps, *self._anchor, *self._velocity]:
            dist.broadcast(tensor, first, group=self._group)
        self.steps = self._averaged_at = int(steps.item())


def _pieces(tensors: Sequence[torch.Tensor]) -> Iterator[list[int]]:
    """Positions of tensors of one type that together are not much larger than a piece."""
    piece: list[int] = []
    size = 0
    for i, tensor in enumerate(tensors):
        if piece and (size + tensor.numel() > _PIECE or tensor.dtype != tensors[piece[0]].dtype):
            yield piece
            piece, size = [], 0
        piece.append(i)
        size += tensor.numel()
    if piece:
        yield piece
