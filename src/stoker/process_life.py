"""Whether a process that a file names is still running, as far as this machine can tell.

A process id alone is not enough: ids are used again, and another machine or container that shares the file counts its own. So
the facts include when the process started, and the boot and the namespace in which its id is valid.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["facts_of", "is_alive", "parent_and_start"]


def facts_of(pid: int) -> dict[str, Any]:
    """What `is_alive` needs to recognise a process of this machine, for JSON."""
    return {"id": pid, "started": parent_and_start(pid)[1], "space": _id_space()}


def is_alive(facts: Mapping[str, Any] | None) -> bool | None:
    """Whether the process with these facts runs; None if it belongs to another machine, or nothing is known about it."""
    if not facts or not facts.get("space") or facts["space"] != _id_space():
        return None
    pid, started = facts.get("id"), facts.get("started")
    if not isinstance(pid, int) or not 0 < pid < 1 << 31 or not started:
        return None
    found = _fields(pid)
    if found is not None:
        return found[19] == started and found[0] not in ("Z", "X")  # a zombie has ended and is not yet waited for
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return None  # /proc hides the processes of other users


def parent_and_start(pid: int) -> tuple[int, str]:
    """The parent of a process and its start time in clock ticks since boot; 0 and nothing if there is no such process."""
    found = _fields(pid)
    return (int(found[1]), found[19]) if found is not None else (0, "")


def _fields(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the state on."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return fields if len(fields) > 19 and fields[1].isdigit() else None


def _id_space() -> str:
    """Identifies the boot of this machine and the namespace of its process ids; empty if the system does not say.

    A digest, because run logs may be published.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        text = f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
