"""After torchrun's agent, Slurm or Kubernetes has restarted the ranks: which checkpoint they continue from, although the user
named none, and how a different number of ranks keeps the global batch size.

Only a checkpoint of the interrupted run counts. The folder may hold older ones, which that run ignored.
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

from stoker.distributed.agreement import from_all_ranks, from_first_rank
from stoker.distributed.lost_rank import is_joining
from stoker.hf.checkpointing import choice
from stoker.hf.checkpointing.same_run import is_complete
from stoker.process_life import parent_and_start
from stoker.run_report.log import NAME, read_entries

__all__ = ["Start", "accumulation_for_same_batch", "job_is_complete", "newest_of_this_run", "run_began"]

_RANK_VARIABLE = "TORCHELASTIC_RUN_ID"
"""Set in the environment of ranks, not of their agent."""


@dataclass(frozen=True)
class Start:
    """How the ranks were started this time; the same on every rank."""

    again: bool = False
    times: int = 0
    """Restarts after a failure, as counted by the agent that counted most; machines that join or leave do not count."""
    agents: tuple[int, ...] = ()
    processes: tuple[int, ...] = ()
    job: str = ""
    """The scheduler's name for the job, the same each time it starts it; empty without a scheduler."""
    by_scheduler: bool = False

    @classmethod
    def read(cls, folder: Path, environment: Mapping[str, str] = os.environ) -> Start:
        """Whether an agent or a scheduler has restarted these ranks for the run in `folder`. A collective under both.

        An agent that joined later has not counted earlier restarts, and no agent counts machines that joined or left. So the
        run log names its agents and ranks: the same agent with other ranks means a restart. A scheduler starts new agents, or
        ranks without any, so the log also names its job.
        """
        has_agent, job = _RANK_VARIABLE in environment, _job(environment)
        if not has_agent and not job:
            return cls()
        if is_joining():
            return cls(again=True)
        count = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
        pid = os.getpid()
        agent = _identity(_agent(pid)) if has_agent else 0
        rows = from_all_ranks((int(count) if count.isdigit() else 0, agent, _identity(pid)))
        times, agents, processes = max(row[0] for row in rows), {row[1] for row in rows} - {0}, {row[2] for row in rows}
        # Rank 0 decides, because it is about to write to that log.
        by_agent = from_first_rank(
            _is_the_same_run(folder / NAME, agents, processes)
            or (times > 0 and not _is_another_run(folder / NAME, agents, job))
        )
        by_scheduler = from_first_rank(
            _may_start_again(environment) and _is_the_same_job(folder / NAME, job, processes)
        )
        again = by_agent or by_scheduler
        return cls(again, times, tuple(sorted(agents)), tuple(sorted(processes)), job, not by_agent and by_scheduler)

    @property
    def facts(self) -> dict[str, Any]:
        """For the run log."""
        found = {"agents": list(self.agents), "processes": list(self.processes), "job": self.job}
        return {name: value for name, value in found.items() if value}

    @property
    def reason(self) -> str:
        if self.by_scheduler:
            return " by the scheduler"
        return f" ({self.times}) after a failure" if self.times else " because machines joined or left"


def newest_of_this_run(folder: Path) -> Path | None:
    """The newest usable checkpoint that the run in `folder` has written itself. A collective."""
    began = run_began(folder)
    return choice.newest_usable(folder, since=math.inf if began is None else began)


def job_is_complete(folder: Path, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a scheduler has started a job again whose run in `folder` was complete. A collective."""
    job = _job(environment)
    if not job or not _may_start_again(environment):
        return False
    return from_first_rank(is_complete(folder) and any(one.get("job") == job for one in _starts(folder / NAME)))


def run_began(folder: Path) -> float | None:
    """When the run in `folder` was first started, by its log; its checkpoints are newer. None without a log."""
    starts = _starts(folder / NAME)
    # The log keeps milliseconds, the file system may keep less.
    return float(starts[0]["time"]) - 1.0 if starts else None


def accumulation_for_same_batch(before: Mapping[str, Any], batch: int, processes: int) -> int | None:
    """Gradient accumulation steps with which `processes` ranks take as many examples per step as the run with the facts
    `before`; None if no whole number does."""
    sizes = [before.get(name) for name in ("batch size", "gradient accumulation", "processes")]
    if before.get("tokens per batch") or not all(isinstance(size, int) and size > 0 for size in sizes):
        return None
    total = math.prod(size for size in sizes if size)
    return total // (batch * processes) if total % (batch * processes) == 0 else None


def _is_the_same_run(log: Path, agents: set[int], processes: set[int]) -> bool:
    return any(agents & set(start.get("agents") or ()) for start in _unfinished(log, processes))


def _is_another_run(log: Path, agents: set[int], job: str) -> bool:
    """Whether the log is of a run that neither these agents nor this job have begun: theirs failed before it began."""
    starts = _starts(log)
    return bool(starts) and not any(
        agents & set(one.get("agents") or ()) or (job and one.get("job") == job) for one in starts
    )


def _is_the_same_job(log: Path, job: str, processes: set[int]) -> bool:
    return bool(job) and any(start.get("job") == job for start in _unfinished(log, processes))


def _unfinished(log: Path, processes: set[int]) -> list[dict[str, Any]]:
    """The starts of the run in the log; none if it is complete, or if these very processes have begun it."""
    starts = _starts(log)
    is_own = any(processes & set(start.get("processes") or ()) for start in starts)
    return [] if is_own or (starts and starts[-1].get("finished")) else starts


def _job(environment: Mapping[str, str]) -> str:
    """STOKER_RUN_ID, which the manifests of `stoker launch --emit` set, or the job of Slurm."""
    if given := environment.get("STOKER_RUN_ID"):
        return given
    number = environment.get("SLURM_JOB_ID")
    return f"slurm {environment.get('SLURM_CLUSTER_NAME', '')} {number}" if number else ""


def _may_start_again(environment: Mapping[str, str]) -> bool:
    """A person may start several runs by hand in one allocation of Slurm; only what Slurm has queued again continues."""
    return bool(environment.get("STOKER_RUN_ID")) or environment.get("SLURM_RESTART_COUNT", "0") not in ("", "0")


def _starts(log: Path) -> list[dict[str, Any]]:
    """The start entries of a run log, with `finished` added to the one of a completed run. A run that starts over begins a
    new log."""
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
    """The nearest ancestor of `pid` that is neither a rank nor started by one."""
    while pid > 1:
        pid = parent_and_start(pid)[0]
        try:
            inside = f"{_RANK_VARIABLE}=".encode() in Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            break
        if not inside:
            break
    return pid


def _identity(pid: int) -> int:
    """A number that identifies a process across hosts and over time."""
    text = f"{socket.gethostname()} {pid} {parent_and_start(pid)[1]}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")  # 48 bits: exact in every JSON reader
