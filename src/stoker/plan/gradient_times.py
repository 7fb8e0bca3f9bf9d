"""Measures when the gradients of a model become complete in the backward pass: how much of their exchange can overlap with it."""

from __future__ import annotations

import time
from itertools import accumulate
from typing import Any

from stoker.plan.cost_model import PARTS

__all__ = ["GradientTimes"]


class GradientTimes:
    """Call `begin` before each backward pass and `end` after it."""

    def __init__(self, model: Any) -> None:
        trained = [one for one in model.parameters() if one.requires_grad]
        self.total = sum(one.numel() for one in trained)
        """The number of parameters that are trained."""
        self._found: list[tuple[float, int]] = []
        self._began = 0.0
        self.seconds: list[float] = []
        """Of each backward pass."""
        self.ready: tuple[float, ...] = ()
        """Of the last backward pass, as `Node.ready`."""
        for one in trained:
            one.register_post_accumulate_grad_hook(self._note)

    def _note(self, parameter: Any) -> None:
        self._found.append((time.perf_counter(), parameter.numel()))

    def begin(self) -> None:
        self._found, self._began = [], time.perf_counter()

    def end(self) -> None:
        seconds = time.perf_counter() - self._began
        self.seconds.append(seconds)
        parts = [0.0] * PARTS
        for at, count in self._found:
            parts[min(int((at - self._began) / seconds * PARTS), PARTS - 1)] += count / self.total
        parts[-1] += max(1 - sum(parts), 0.0)  # parameters without a gradient are sent at the end
        self.ready = tuple(min(share, 1.0) for share in accumulate(parts))
