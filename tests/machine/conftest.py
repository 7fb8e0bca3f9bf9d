"""The recorded machines as fixtures; each tree is laid out once per run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from machine.recorded.layout import lay_out
from machine.recorded.machines import MACHINES
from stoker.machine import Machine


@pytest.fixture(scope="session")
def recorded_root(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    roots: dict[str, Path] = {}

    def root(name: str) -> Path:
        if name not in roots:
            roots[name] = lay_out(MACHINES[name](), tmp_path_factory.mktemp(name))
        return roots[name]

    return root


@pytest.fixture(scope="session")
def recorded(recorded_root: Callable[[str], Path]) -> Callable[[str], Machine]:
    return lambda name: Machine.read(recorded_root(name))
