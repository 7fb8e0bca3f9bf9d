"""Local SGD for slow networks: ranks train alone for some steps, then average; DiLoCo's outer optimizer in between.

Every `every` steps the ranks average how far their weights have moved since the last time and an outer Nesterov step
applies it to the weights all started from. With outer_lr 1 and outer_momentum 0 that is plain averaging of weights.
The model must not be wrapped in DDP: nothing is sent between the averages.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

__all__ = ["LocalSGD"]


class LocalSGD:
    """Call `step()` after every optimizer step; it returns whether the ranks have just averaged."""

    def __init__(
        self,
        model: torch.nn.Module,
        every: int,
        *,
        outer_lr: float = 1.0,
        outer_momentum: float = 0.0,
        group: Any = None,
    ) -> None:
        if every < 1:
            raise ValueError(f"every={every} must be at least 1 step")
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            raise ValueError("LocalSGD takes the model itself, not DDP: DDP would average the gradients of every step")
        self.every = every
        self.outer_lr = outer_lr
        self.outer_momentum = outer_momentum
        self.steps = 0
        self._group = group
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        with torch.no_grad():
            for tensor in [*model.parameters(), *model.buffers()]:
                dist.broadcast(tensor.data, dist.get_global_rank(self._world, 0), group=group)
        self._anchor = [p.detach().clone() for p in self._parameters]
        self._velocity = [torch.zeros_like(p) for p in self._anchor] if outer_momentum else []

    @property
    def _world(self) -> Any:
        return self._group if self._group is not None else dist.group.WORLD

    def step(self) -> bool:
        self.steps += 1
        if self.steps % self.every:
            return False
        self.average()
        return True

    @torch.no_grad()
    def average(self) -> None:
        """Averages now; also to be called at the end of training and before a checkpoint."""
        ranks = dist.get_world_size(self._group)
        moves = [anchor - p for anchor, p in zip(self._anchor, self._parameters, strict=True)]
        works = [dist.all_reduce(move, group=self._group, async_op=True) for move in moves]
        for i, (work, move) in enumerate(zip(works, moves, strict=True)):
            work.wait()
            move /= ranks
            if self.outer_momentum:
                self._velocity[i].mul_(self.outer_momentum).add_(move)
                move.add_(self._velocity[i], alpha=self.outer_momentum)
            self._anchor[i].sub_(move, alpha=self.outer_lr)
            self._parameters[i].copy_(self._anchor[i])

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "anchor": self._anchor, "velocity": self._velocity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]
        for mine, theirs in zip([*self._anchor, *self._velocity], [*state["anchor"], *state["velocity"]], strict=True):
            mine.copy_(theirs)
