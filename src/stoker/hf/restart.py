"""After torchrun's agent has started all ranks again: which checkpoint to go on from, though nobody asked for one.

Only a checkpoint of the run that was cut off counts. A folder may hold others from long ago, which that run ignored.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from stoker.hf import checkpoints
from stoker.report.log import NAME

__all__ = ["checkpoint_to_go_on_from", "times_restarted"]


def times_restarted() -> int:
    """How often the agent has started this rank again; 0 without an agent."""
    told = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return int(told) if told.isdigit() else 0


def checkpoint_to_go_on_from(folder: Path) -> Path | None:
    """The last good checkpoint that the run in `folder` has written itself."""
    began = _began(folder / NAME)
    found = checkpoints.last_good(folder) if began is not None else None
    if found is None or began is None:
        return None
    # The log keeps milliseconds, the file system may keep less.
    return found if (found / "trainer_state.json").stat().st_mtime > began - 1.0 else None


def _began(log: Path) -> float | None:
    """When the run of a log was first started; a run that starts over begins a new log."""
    try:
        with open(log, encoding="utf-8", errors="replace") as file:
            for line in file:
                entry = json.loads(line)
                if entry.get("kind") == "start":
                    return float(entry["time"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None
