"""Runs a function as soon as a module has been imported, without importing it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Sequence
from types import ModuleType
from typing import Any

# Nothing of importlib at the top: `import stoker` must stay cheap, and finders and loaders need no base class.

__all__ = ["ImportHook", "after_import"]


class ImportHook:
    """A finder that calls `imported(name)` after each module of `names` has been executed."""

    names: Container[str] = ()

    def __init__(self) -> None:
        self._busy: set[str] = set()

    def imported(self, name: str) -> None:
        raise NotImplementedError

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if name not in self.names or name in self._busy:
            return None
        import importlib.util

        self._busy.add(name)  # so that the other finders look for the module itself
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._busy.discard(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Then(spec.loader, lambda: self.imported(name))  # type: ignore[assignment]
        return spec


def after_import(name: str, then: Callable[[], None]) -> None:
    """Calls `then` now if the module `name` has been imported, else once it has been."""
    spec = getattr(sys.modules.get(name), "__spec__", None)
    if getattr(spec, "_initializing", False):
        # `from transformers import Trainer` imports torch half-way through, and `import torch` imports Stoker.
        _call_at_the_end(spec, then)
    elif name in sys.modules:
        then()
    else:
        hook = _OneModule()
        hook.names, hook.then = (name,), then
        sys.meta_path.insert(0, hook)  # type: ignore[arg-type]


def _call_at_the_end(spec: Any, then: Callable[[], None]) -> None:
    """Calls `then` when the module of `spec`, which is being executed, is complete: Python then resets a mark in its spec."""
    kind = type(spec)

    class Watched(kind):  # type: ignore[misc, valid-type]
        def __setattr__(self, attribute: str, value: Any) -> None:
            super().__setattr__(attribute, value)
            if attribute == "_initializing" and not value:
                self.__class__ = kind
                if self.name in sys.modules:  # else it has failed
                    then()

    spec.__class__ = Watched


class _OneModule(ImportHook):
    then: Callable[[], None]

    def imported(self, name: str) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        self.then()


class _Then:
    """A loader that calls `then` after its module has been executed."""

    def __init__(self, loader: Any, then: Callable[[], None]) -> None:
        self._loader = loader
        self._then = then

    def create_module(self, spec: Any) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._then()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
