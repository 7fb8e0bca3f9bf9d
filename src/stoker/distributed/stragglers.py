"""Who waits for whom: how long each rank stood at the meeting of the gradients, step by step.

Every rank leaves that meeting at the same moment, so the one that waited least came last and is the one the others waited
for; no clocks are compared. Measuring costs a clock reading per parameter, and figures travel only when `take` is called.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["Arrival", "StepWait", "Waiting", "verdicts"]


class Arrival:
    """Notes when the last gradient of a backward pass was there: from then on a rank only communicates and waits."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.at = 0.0
        self._handles = [
            p.register_post_accumulate_grad_hook(self._note) for p in model.parameters() if p.requires_grad
        ]

    def _note(self, parameter: torch.Tensor) -> None:
        self.at = time.perf_counter()

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []


@dataclass(frozen=True)
class StepWait:
    """One step: the rank that came last, and how much longer than it each rank stood waiting."""

    slowest: int
    waited: tuple[float, ...]
    """Seconds by rank; 0 for the slowest, which includes the communication that all need."""

    @property
    def longest(self) -> float:
        return max(self.waited)


class Waiting:
    """The waits of this rank since the last `take`."""

    def __init__(self, group: Any = None) -> None:
        self._group = group
        self._steps: list[float] = []
        self._now = 0.0

    def add(self, seconds: float) -> None:
        """A wait within the step that is under way."""
        self._now += seconds

    def step(self) -> None:
        """The step is over; all ranks must count the same steps."""
        self._steps.append(self._now)
        self._now = 0.0

    def take(self) -> list[StepWait]:
        """All ranks' waits, step by step; a collective, to be called by all ranks after the same step."""
        mine = torch.tensor(self._steps, dtype=torch.float64)
        self._steps = []
        if not len(mine):
            return []
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(everyone, mine, group=self._group)
        return verdicts(torch.stack(everyone, 1).tolist())


def verdicts(waits: list[list[float]]) -> list[StepWait]:
    """Rows of waits by rank -> who was waited for."""
    found = []
    for row in waits:
        least = min(row)
        found.append(StepWait(row.index(least), tuple(round(one - least, 6) for one in row)))
    return found
