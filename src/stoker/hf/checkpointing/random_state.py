"""The random number generators that a checkpoint saves: Python's, NumPy's and torch's.

A resumed run must find them where the step before the checkpoint left them, so nothing but training may advance them.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

__all__ = ["RandomState", "current", "preserved"]

RandomState = tuple[Any, Any, torch.Tensor]


def current() -> RandomState:
    return random.getstate(), np.random.get_state(), torch.random.get_rng_state()


@contextlib.contextmanager
def preserved(during: RandomState | None = None) -> Iterator[None]:
    """Restores the generators on exit; inside, they start from the state `during` if one is given."""
    before = current()
    try:
        if during is not None:
            _set(during)
        yield
    finally:
        _set(before)


def _set(state: RandomState) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.random.set_rng_state(state[2])
