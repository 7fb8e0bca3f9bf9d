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

__all__ = ["RandomState", "current", "numpy_generator", "preserved", "use", "use_numpy_generator"]

RandomState = tuple[Any, Any, torch.Tensor]


def current() -> RandomState:
    return random.getstate(), np.random.get_state(), torch.random.get_rng_state()


@contextlib.contextmanager
def preserved(during: RandomState | None = None) -> Iterator[None]:
    """Restores the generators on exit; inside, they start from the state `during` if one is given."""
    before = current()
    try:
        if during is not None:
            use(during)
        yield
    finally:
        use(before)


def use(state: RandomState) -> None:
    """Sets the generators to a state that `current` has returned."""
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.random.set_rng_state(state[2])


_NUMPY: Any = np.random  # NumPy's type stubs lack these two functions


def numpy_generator() -> Any:
    """What NumPy's global functions draw from. Replacing it is a thousand times faster than reading and setting its state."""
    return _NUMPY.get_bit_generator()


def use_numpy_generator(generator: Any) -> None:
    """Makes NumPy's global functions draw from this one. A normal number kept for the next call is dropped."""
    _NUMPY.set_bit_generator(generator)
