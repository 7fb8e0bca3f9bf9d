"""After torchrun's agent has started the ranks again: which checkpoint to go on from, though nobody asked for one, and how
to go on with another number of ranks.

Only a checkpoint of the run that was cut off counts. A folder may hold others from long ago, which that run ignored.
"""

from __future__ import annotations

import hashlib
import math
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from stoker.hf.checkpointing import choice
from stoker.run_report.log import NAME, read_entries

__all__ = ["Start", "checkpoint_to_go_on_from", "run_began", "steps_that_keep_the_batch"]

_MARK = "TORCHELASTIC_RUN_ID"
"""In the environment of ranks, not of their agent."""


@dataclass(frozen=True)
class Start:
    """This start of all ranks, the same on every one of them."""

    again: bool = False
    times: int = 0
    """How often failed ranks were started again, as the agent that counts most says; machines that come and go do not count."""
    agents: tuple[int, ...] = ()
    processes: tuple[int, ...] = ()

    @classmethod
    def read(cls, folder: Path, environment: Mapping[str, str] = os.environ) -> Start:
        """Whether an agent has started these ranks again for the run in `folder`. A collective under torchrun.

        An agent that joined later has not counted what went before, and none counts a machine that came or went. So the log
        of the run names its agents and ranks: the same agent with other ranks means a new start.
        """
        if _MARK not in environment:
            return cls()
        told = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
        mine = [int(told) if told.isdigit() else 0, _identity(_agent(os.getpid())), _identity(os.getpid())]
        together = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        rows = _from_all(mine) if together else [mine]
        times, agents, processes = max(row[0] for row in rows), {row[1] for row in rows}, {row[2] for row in rows}
        again = times > 0 or _is_the_same_run(folder / NAME, agents, processes)
        if together:  # the first rank's word: it is about to write to that log
            word = torch.tensor([int(again)])
            dist.broadcast(word, 0)
            again = bool(word.item())
        return cls(again, times, tuple(sorted(agents)), tuple(sorted(processes)))

    @property
    def facts(self) -> dict[str, Any]:
        """For the log."""
        return {"agents": list(self.agents), "processes": list(self.processes)} if self.agents else {}


def checkpoint_to_go_on_from(folder: Path) -> Path | None:
    """The last good checkpoint that the run in `folder` has written itself. A collective where there are several ranks."""
    began = run_began(folder)
    return choice.newest_whole(folder, since=math.inf if began is None else began)


def run_began(folder: Path) -> float | None:
    """When the run in `folder` was started for the first time, as its log says; its checkpoints are newer."""
    starts = _starts(folder / NAME)
    # The log keeps milliseconds, the file system may keep less.
    return float(starts[0]["time"]) - 1.0 if starts else None


def steps_that_keep_the_batch(before: Mapping[str, Any], batch: int, processes: int) -> int | None:
    """Batches to accumulate so that `processes` take as many examples per step as the run `before`; None if none fit."""
    sizes = [before.get(name) for name in ("batch size", "gradient accumulation", "processes")]
    if before.get("tokens per batch") or not all(isinstance(size, int) and size > 0 for size in sizes):
        return None
    total = int(sizes[0]) * int(sizes[1]) * int(sizes[2])  # type: ignore[arg-type]
    return total // (batch * processes) if total % (batch * processes) == 0 else None


def _from_all(mine: list[int]) -> list[list[int]]:
    own = torch.tensor(mine)
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, own)
    return [row.tolist() for row in everyone]


def _is_the_same_run(log: Path, agents: set[int], processes: set[int]) -> bool:
    starts = _starts(log)
    if not starts or starts[-1].get("finished"):
        return False
    before = {name: {one for start in starts for one in start.get(name) or ()} for name in ("agents", "processes")}
    return bool(before["agents"] & agents) and not before["processes"] & processes


def _starts(log: Path) -> list[dict[str, Any]]:
    """The starts of the run in a log; a run that starts over begins a new log. One that has come to its end is `finished`."""
    found: list[dict[str, Any]] = []
    try:
        for entry in filter(None, read_entries(log)):
            if entry["kind"] == "start" and entry.get("time") is not None:
                found.append(entry)
            elif entry["kind"] == "end" and entry.get("reason") == "finished" and found:
                found[-1] = {**found[-1], "finished": True}
    except OSError:
        pass
    return found


def _agent(pid: int) -> int:
    """The nearest process above `pid` that is no rank, nor anything that a rank has started."""
    while pid > 1:
        pid = _stat(pid)[0]
        try:
            inside = f"{_MARK}=".encode() in Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            break
        if not inside:
            break
    return pid


def _identity(pid: int) -> int:
    """A number that no other process, before, after or elsewhere, has."""
    words = f"{socket.gethostname()} {pid} {_stat(pid)[1]}"
    return int.from_bytes(hashlib.sha256(words.encode()).digest()[:6], "big")  # 48 bits: any JSON reader keeps them


def _stat(pid: int) -> tuple[int, str]:
    """Parent and start time of a process."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(words[1]), words[19]
    except (OSError, ValueError, IndexError):
        return 0, ""
