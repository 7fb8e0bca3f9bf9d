"""Which torch.distributed backend serves, in one place: what was asked for, what is there, and the line to say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed

__all__ = ["Choice", "alias_ccl", "choose"]


@dataclass(frozen=True)
class Choice:
    name: str
    """What init_process_group gets."""
    note: str | None = None
    """One line, if it is not what was asked for."""


def choose(asked: str | None) -> Choice:
    """The backend for CPU tensors when `asked` was asked for; None stands for the default."""
    if asked in (None, "", "gloo"):
        return Choice("gloo")
    if asked in ("ccl", "mpi"):
        if torch.distributed.is_backend_available(asked):
            return Choice(asked)
        return Choice("gloo", f"backend {asked}: not available here, gloo is used; the results are the same")
    return Choice("gloo", f"backend {asked}: not for CPUs, gloo is used")


def alias_ccl() -> str | None:
    """Makes init_process_group("ccl") work where no ccl is installed, by gloo; returns the line to say, None if it is there."""
    choice = choose("ccl")
    if choice.name == "ccl":
        return None
    torch.distributed.Backend.register_backend("ccl", _gloo, devices=["cpu"])
    return choice.note


def _gloo(store: Any, rank: int, size: int, timeout: Any) -> Any:
    return torch.distributed.ProcessGroupGloo(store, rank, size, timeout)
