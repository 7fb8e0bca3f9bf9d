"""Models for trainers that start from the same weights: the one that was needed to read the data, then new ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["FreshModels"]


class FreshModels:
    """`first` is loaded already, and is given to the first trainer; each further trainer gets a model that `load` returns."""

    def __init__(self, first: Any, load: Callable[[], Any]) -> None:
        self._first, self._load = first, load

    @classmethod
    def of(cls, load: Callable[[], Any]) -> FreshModels:
        return cls(load(), load)

    @property
    def first(self) -> Any:
        assert self._first is not None, "a trainer has it, and changes its weights"
        return self._first

    def take(self) -> Any:
        taken, self._first = self._first, None
        return self._load() if taken is None else taken
