"""The log of a run: one JSON object per line, appended as things happen, readable after a kill at any byte.

Every entry has `kind` and `time`. A resumed run appends a new `start` with the step it went on from; `read_run` drops
what the killed run had logged beyond that step, because it was done again.
"""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["NAME", "Run", "RunLog", "read_run"]

NAME = "run.jsonl"


class RunLog:
    """Appends entries to <folder>/run.jsonl. A log that cannot be written is not worth a training run: it goes quiet."""

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder) / NAME
        self._works = True

    def write(self, kind: str, **values: Any) -> None:
        if not self._works:
            return
        line = json.dumps({"kind": kind, "time": round(time.time(), 3), **_plain(values)}, ensure_ascii=False)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            torn = _ends_torn(self.path)
            with open(self.path, "a", encoding="utf-8", errors="surrogatepass") as file:
                # One write per entry; after a kill in the middle of one, begin a new line.
                file.write(("\n" if torn else "") + line + "\n")
        except OSError:
            self._works = False

    def start_over(self) -> None:
        """Keeps the log of an earlier run in the same folder under another name."""
        if self.path.exists():
            os.replace(self.path, self.path.with_suffix(".jsonl.old"))


def _ends_torn(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
    except OSError:  # not there, or empty
        return False


def _plain(value: Any) -> Any:
    """What JSON can hold: NaN becomes text, numbers of other libraries become numbers, everything else its text."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, bool | int | str) or value is None:
        return value
    if hasattr(value, "item") and not isinstance(value, float):
        return _plain(value.item())
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return str(value)


@dataclass
class Run:
    """A run as its log tells it, over all its interruptions."""

    start: dict[str, Any] = field(default_factory=dict)
    """The last start entry, over the first one's."""
    steps: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    waits: list[dict[str, Any]] = field(default_factory=list)
    """Which ranks waited for which: rows of step, the rank that was waited for, and the seconds each rank waited."""
    others: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The last entry of each other kind."""
    resumed_at: list[int] = field(default_factory=list)
    peak: float | None = None
    """Operations per second that shares of the peak refer to."""
    torn: int = 0
    """Lines that could not be read."""

    @property
    def finished(self) -> bool:
        return self.others.get("end", {}).get("reason") == "finished"


def read_run(folder: str | Path) -> Run:
    """Reads <folder>/run.jsonl. Raises FileNotFoundError if there is none."""
    run = Run()
    with open(Path(folder) / NAME, encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                entry = json.loads(line)
                kind = entry["kind"]
            except (ValueError, KeyError, TypeError):
                run.torn += bool(line.strip())
                continue
            if kind == "start":
                _take_start(run, entry)
            elif kind == "step":
                run.steps.append(entry)
            elif kind == "evaluation":
                run.evaluations.append(entry)
            elif kind == "waits":
                run.waits.append(entry)
            else:
                run.others[kind] = entry
    _one_peak(run)
    return run


def _one_peak(run: Run) -> None:
    """All shares refer to the highest rate that was reached: a peak that proved too low on the way was raised."""
    told = [one for one in run.steps if isinstance(one.get("peak"), int | float) and "share_of_peak" in one]
    # A share above 1, as older logs may have, shows that training itself reached more than the peak then known.
    run.peak = max((one["peak"] * max(one["share_of_peak"], 1.0) for one in told), default=None)
    for one in told:
        one["share_of_peak"] *= one["peak"] / run.peak


def _take_start(run: Run, entry: dict[str, Any]) -> None:
    step = entry.get("resumed_at") or 0
    if run.start:
        run.resumed_at.append(step)
    run.start = {**run.start, **entry}
    run.steps = [one for one in run.steps if one.get("step", 0) <= step]
    run.evaluations = [one for one in run.evaluations if one.get("step", 0) <= step]
    run.waits = [one for one in run.waits if one.get("step", 0) <= step]
    run.others.pop("end", None)
