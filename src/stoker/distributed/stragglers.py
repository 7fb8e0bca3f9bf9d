"""Finds the rank that the others wait for: how long each rank waits for the others' gradients, step by step.

All ranks finish waiting at the same moment, so the one that waited least was the last; no clocks are compared. Measuring costs a
clock reading per parameter, and the figures are exchanged only when `gather` is called.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["LastGradient", "StepWait", "StragglerLog", "WaitTimes", "step_waits"]

log = logging.getLogger("stoker")

_SLOW_SHARE, _SLOW_STEPS, _SLOW_TIME = 0.8, 10, 0.1
"""A rank is reported as slow if the others waited for it in this share of at least so many steps, for this share of the time."""
_SLOW_WAITS = 3  # fewer may be chance; with local SGD ranks wait for each other every K steps only


class LastGradient:
    """Records when the last gradient of a backward pass was ready: after that a rank only communicates and waits."""

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
    """One step: the slowest rank, and how much longer than that one each rank waited."""

    slowest: int
    waited: tuple[float, ...]
    """Seconds by rank; 0 for the slowest. The communication itself, which all ranks need, is not included."""

    @property
    def longest(self) -> float:
        return max(self.waited)


class WaitTimes:
    """How long this rank has waited since the last `gather`."""

    def __init__(self, group: Any = None) -> None:
        self._group = group
        self._steps: list[float] = []
        self._now = 0.0

    def add(self, seconds: float) -> None:
        """A wait within the current step."""
        self._now += seconds

    def step(self) -> None:
        """The step has ended; all ranks must count the same steps."""
        self._steps.append(self._now)
        self._now = 0.0

    def gather(self) -> list[StepWait]:
        """All ranks' waits, step by step. Collective: all ranks call it after the same step."""
        mine = torch.tensor(self._steps, dtype=torch.float64)
        self._steps = []
        if not len(mine):
            return []
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(everyone, mine, group=self._group)
        return step_waits(torch.stack(everyone, 1).tolist())


def step_waits(waits: list[list[float]]) -> list[StepWait]:
    """Rows of seconds by rank, one row per step -> the slowest rank and the waits of the others."""
    found = []
    for row in waits:
        least = min(row)
        found.append(StepWait(row.index(least), tuple(round(one - least, 6) for one in row)))
    return found


class StragglerLog:
    """Sums up the waits for the log, and warns once about each rank that keeps delaying the others."""

    def __init__(self) -> None:
        self._warned: set[int] = set()

    def figures(self, steps: list[StepWait], seconds: float, *, warn: bool) -> dict[str, float]:
        """`waited`: seconds per step that the average rank lost; `waited_for_rank`: for whom, absent if no rank waited.

        `seconds` is the time of an average step.
        """
        waits = [step for step in steps if step.longest]  # between the averages of local SGD no rank waits
        if not waits:
            return {"waited": 0.0}
        slowest, times = Counter(step.slowest for step in waits).most_common(1)[0]
        lost = sum(sum(step.waited) for step in waits) / len(steps) / len(steps[0].waited)
        longest = sum(step.longest for step in waits) / len(steps)
        often = len(steps) >= _SLOW_STEPS and len(waits) >= _SLOW_WAITS and times >= _SLOW_SHARE * len(waits)
        if often and longest >= _SLOW_TIME * seconds and slowest not in self._warned:
            self._warned.add(slowest)
            if warn:
                log.warning(
                    "rank %d is slow: the other ranks waited for it in %d of the last %d synchronizations, on average %.2f s of "
                    "a step of %.2f s; check what else runs on its machine", slowest, times, len(waits), longest, seconds,
                )  # fmt: skip
        return {"waited": round(lost, 4), "waited_for_rank": slowest}
