"""How much memory this process can still allocate."""

from __future__ import annotations

from stoker.machine import this_machine

__all__ = ["available"]


def available() -> int | None:
    """Bytes that this process can still allocate; None if unknown."""
    machine = this_machine()
    found = [size for size in (machine.memory_available, machine.limits.cgroup.memory_limit) if size is not None]
    return min(found, default=None)
