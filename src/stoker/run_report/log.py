"""The log of a run: one JSON object per line, appended as things happen, readable after a kill at any byte.

Every entry has `kind` and `time`. A resumed run appends a new `start` with the step it went on from; `read_run` drops
what the killed run had logged beyond that step, because it was done again. Whoever reads the log may rely on the types in
`_SCHEMA`: a line that breaks them is left out and counted.
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeGuard

__all__ = ["NAME", "Run", "RunLog", "number", "read_entries", "read_run"]

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
    """A run as its log tells it, over all its interruptions. Entries have the types of `_SCHEMA`."""

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
    lines: int = 0
    """Lines of the log that are not empty."""
    bad_lines: int = 0
    """Those that are no entry: cut short by a kill, not JSON, or with values of another type than they must have."""

    @property
    def finished(self) -> bool:
        return self.others.get("end", {}).get("reason") == "finished"

    @property
    def bad_lines_note(self) -> str:
        """One sentence about the lines that were left out; empty if there are none."""
        if not self.bad_lines:
            return ""
        were = "line is" if self.lines == 1 else f"lines {'is' if self.bad_lines == 1 else 'are'}"
        return f"{self.bad_lines:,} of {self.lines:,} {were} damaged and left out."


Check = Callable[[Any], bool]

_LARGEST = 1e100  # far above anything a run measures, and far enough below the largest float to compute and draw with
_LARGEST_INT = 1 << 53  # what a float holds exactly; plots take no larger ones than C does
_NOT_FINITE = ("nan", "inf", "-inf")  # as the log writes them
_YEAR_9999 = 253_370_764_800
_DEEPEST = 12


def _is_number(value: Any) -> TypeGuard[float]:
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) <= _LARGEST_INT
    return isinstance(value, float) and abs(value) <= _LARGEST


def number(entry: Mapping[str, Any], name: str) -> float | None:
    """The finite number under `name`; None if there is none, as with a loss that became NaN."""
    value = entry.get(name)
    return float(value) if _is_number(value) else None


def _figure(value: Any) -> bool:
    return _is_number(value) or value in _NOT_FINITE


def _amount(value: Any) -> bool:
    return _is_number(value) and value >= 0


def _positive(value: Any) -> bool:
    return _is_number(value) and value > 0


def _count(value: Any) -> bool:
    return isinstance(value, int) and _is_number(value) and value >= 0


def _integer(value: Any) -> bool:
    return isinstance(value, int)  # of any size: numbers that name processes


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _scalar(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float)


def _anything(value: Any) -> bool:
    return True


def _moment(value: Any) -> bool:
    return _amount(value) and value < _YEAR_9999  # what the calendar can show


def _or_none(check: Check) -> Check:
    """For a field that may be missing."""
    return lambda value: value is None or check(value)


def _list_of(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _dict_of(check: Check) -> Check:
    return lambda value: isinstance(value, dict) and all(map(check, value.values()))


def _row_of(length: int) -> Check:
    return lambda value: isinstance(value, list) and len(value) == length and all(map(_scalar, value))


def _fields(**checks: Check) -> Check:
    """An object with these fields. Others may stand beside them: scripts log what they like, and nobody reads it here."""
    return lambda value: isinstance(value, dict) and all(check(value.get(name)) for name, check in checks.items())


def _wait(row: Any) -> bool:
    """[step, rank that was waited for, seconds of rank 0, seconds of rank 1, ...]"""
    if not isinstance(row, list) or len(row) < 3:
        return False
    return _count(row[1]) and row[1] < len(row) - 2 and all(map(_is_number, row))


def _histogram(entry: Any) -> bool:
    counts, edges = entry.get("counts"), entry.get("edges")
    if not _list_of(_count)(counts) or not _list_of(_amount)(edges):
        return False
    return len(edges) == len(counts) + 1 and all(low < high for low, high in pairwise(edges))


def _both(first: Check, second: Check) -> Check:
    return lambda value: first(value) and second(value)


_EXAMPLE = _fields(
    question=_or_none(_text), context=_or_none(_text), texts=_or_none(_list_of(_text)), answer=_or_none(_scalar),
    expected=_or_none(_list_of(_scalar)), begin=_or_none(_count), end=_or_none(_count), probability=_or_none(_figure),
)  # fmt: skip
_MACHINE = _fields(
    cpu=_or_none(_text), system=_or_none(_text), cores=_or_none(_count), threads=_or_none(_count),
    memory=_or_none(_amount), gflops=_or_none(_amount),
)  # fmt: skip

_SCHEMA: dict[str, Check] = {
    "start": _fields(
        resumed_at=_or_none(_count), task=_or_none(_text), title=_or_none(_text), model=_or_none(_text),
        command=_or_none(_text), versions=_or_none(_dict_of(_scalar)), machine=_or_none(_MACHINE),
        arguments=_or_none(_dict_of(_anything)), agents=_or_none(_list_of(_integer)), processes=_or_none(_list_of(_integer)),
    ),
    "model": _fields(
        name=_or_none(_text), type=_or_none(_text), parameters=_or_none(_count), steps=_or_none(_count),
    ),
    "applied": _fields(
        parts=_or_none(_list_of(_row_of(3))), left_alone=_or_none(_list_of(_row_of(2))), settings=_or_none(_dict_of(_scalar)),
    ),
    "lengths": _both(
        _fields(mean=_amount, longest=_positive, rows=_count, padded_to=_or_none(_positive)), _histogram
    ),
    "step": _fields(
        step=_count, loss=_or_none(_figure), learning_rate=_or_none(_figure), tokens_per_second=_or_none(_figure),
        padding_avoided=_or_none(_figure), share_of_peak=_or_none(_figure), peak=_or_none(_amount),
        phases=_or_none(_dict_of(_is_number)),
    ),
    # Metrics are the script's own, and may be lists or texts; `number` picks those that can be shown.
    "evaluation": _fields(step=_count),
    "examples": _fields(rows=_or_none(_list_of(_EXAMPLE))),
    "waits": _fields(step=_count, rows=_or_none(_list_of(_wait))),
    "speed": _fields(
        sides=_dict_of(_both(bool, _list_of(_positive))), ratio=_or_none(_figure), note=_or_none(_text),
    ),
    "trained": _fields(step=_or_none(_count), train_runtime=_or_none(_figure)),
    "end": _fields(reason=_or_none(_text), step=_or_none(_count)),
}  # fmt: skip
"""What the entries of each kind hold. Kinds that are not listed may hold anything: the page does not show them."""


def _is_shallow(value: Any, left: int = _DEEPEST) -> bool:
    """Whether a value can be shown as text: Python's own `str` gives up on what is nested a few hundred times."""
    if not isinstance(value, list | dict):
        return True
    items = value.values() if isinstance(value, dict) else value
    return left > 0 and all(_is_shallow(item, left - 1) for item in items)


def _entry(line: str) -> dict[str, Any] | None:
    """The entry of a line; None if it is none."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(entry, dict) or not isinstance(entry.get("kind"), str):
        return None
    good = _or_none(_moment)(entry.get("time")) and _is_shallow(entry) and _SCHEMA.get(entry["kind"], _anything)(entry)
    return entry if good else None


def read_run(folder: str | Path) -> Run:
    """Reads <folder>/run.jsonl. Raises OSError if it cannot be read, FileNotFoundError if there is none."""
    run = Run()
    for entry in read_entries(Path(folder) / NAME):
        run.lines += 1
        if entry is None:
            run.bad_lines += 1
        elif entry["kind"] == "start":
            _take_start(run, entry)
        elif entry["kind"] == "step":
            run.steps.append(entry)
        elif entry["kind"] == "evaluation":
            run.evaluations.append(entry)
        elif entry["kind"] == "waits":
            run.waits.append(entry)
        else:
            run.others[entry["kind"]] = entry
    _one_peak(run)
    return run


def read_entries(path: Path) -> Iterator[dict[str, Any] | None]:
    """The entries of a log, and None for each line that is damaged. Raises OSError if the file cannot be read."""
    if not stat.S_ISREG(os.stat(path).st_mode):  # a pipe or a device might never end
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    with open(path, encoding="utf-8-sig", errors="replace") as file:
        yield from map(_entry, filter(str.strip, file))


def _one_peak(run: Run) -> None:
    """All shares refer to the highest rate that was reached: a peak that proved too low on the way was raised."""
    told = [one for one in run.steps if number(one, "peak") and number(one, "share_of_peak") is not None]
    # A share above 1, as older logs may have, shows that training itself reached more than the peak then known.
    run.peak = max((one["peak"] * max(one["share_of_peak"], 1.0) for one in told), default=None)
    for one in told:
        one["share_of_peak"] *= one["peak"] / run.peak


def _take_start(run: Run, entry: dict[str, Any]) -> None:
    step = entry.get("resumed_at") or 0
    if run.start:
        run.resumed_at.append(step)
    run.start = {**run.start, **entry}
    run.steps = [one for one in run.steps if one["step"] <= step]
    run.evaluations = [one for one in run.evaluations if one["step"] <= step]
    run.waits = [one for one in run.waits if one["step"] <= step]
    run.others.pop("end", None)
