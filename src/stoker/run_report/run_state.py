"""Whether a run is training, has ended, or was killed; and when it will be done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from stoker.english import duration
from stoker.process_life import is_alive
from stoker.run_report.log import PRUNED, Run

__all__ = ["State", "seconds_left", "state_of"]

Name = Literal["waiting", "running", "silent", "finished", "pruned", "stopped", "killed"]

_PATIENCE = 60.0
"""Seconds without an entry before a run on another machine is called silent; longer if its entries come further apart."""
_GAPS = 4.0


@dataclass(frozen=True)
class State:
    name: Name
    details: str = ""

    @property
    def label(self) -> str:
        return {"waiting": "not started", "silent": "no news"}.get(self.name, self.name)

    @property
    def tone(self) -> str:
        """The class of its label on a page."""
        if self.name in ("running", "waiting"):
            return "busy"
        return {"finished": "good", "pruned": "idle"}.get(self.name, "bad")

    @property
    def may_continue(self) -> bool:
        return self.name in ("waiting", "running", "silent")


def state_of(run: Run, quiet_for: float) -> State:
    """By the log, by the process that writes it if it belongs to this machine, else by the time since the last entry."""
    if not run.start:
        return State("waiting", "nothing has been logged yet")
    end = run.others.get("end")
    if end is not None:
        reason = (end.get("reason") or "")[:200]
        if reason == PRUNED:
            return State("pruned", "the search stopped it, because it was worse than other trials")
        return State("finished") if run.finished else State("stopped", reason)
    last = run.steps[-1]["step"] if run.steps else run.start.get("resumed_at") or 0
    alive = is_alive(run.start.get("process"))
    if alive is False:
        return State("killed", f"its process ended without finishing, after step {last:,}")
    if alive is None and quiet_for > max(_PATIENCE, _GAPS * run.longest_gap):
        return State("silent", f"the last entry is {duration(quiet_for)} old: the run may have been killed")
    return State("running")


def seconds_left(run: Run, quiet_for: float) -> float | None:
    """Until the last planned step, at the pace since the last start with evaluations and checkpoints; None if unknown."""
    planned = run.others.get("model", {}).get("steps")
    began, first = run.start.get("time"), run.start.get("resumed_at") or 0
    steps = [one for one in run.steps if one["step"] > first and one.get("time") is not None]
    if not planned or not steps or began is None:
        return None
    last = steps[-1]
    if len(steps) > 1:  # loading and preparing, before the first step, will not happen again
        began, first = steps[0]["time"], steps[0]["step"]
    done = last["step"] - first
    if done <= 0 or last["time"] <= began:
        return None
    left = (planned - last["step"]) * (last["time"] - began) / done
    since = quiet_for + max((run.last_time or last["time"]) - last["time"], 0.0)
    return float(max(left - since, 0.0))
