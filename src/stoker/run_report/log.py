"""The log of a run: one JSON object per line, appended during the run, readable after a kill at any byte.

Every entry has `kind` and `time`. A resumed run appends a new `start` with the step it resumed at; `read_run` then drops what
the killed run had logged after that step, because those steps are repeated. Entries returned by the readers have the types in
`_SCHEMA`; lines that do not are skipped and counted.
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

__all__ = [
    "NAME",
    "PRUNED",
    "Run",
    "RunLog",
    "number",
    "parse_entry",
    "plain",
    "read_entries",
    "read_run",
    "require_regular",
]

NAME = "run.jsonl"
PRUNED = "pruned"
"""The reason for the end of a trial that `stoker tune` stopped because it was worse than others."""


class RunLog:
    """Appends entries to <folder>/run.jsonl. If that fails, logging stops and training continues."""

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder) / NAME
        self._works = True

    def write(self, kind: str, **values: Any) -> None:
        if not self._works:
            return
        line = json.dumps({"kind": kind, "time": round(time.time(), 3), **plain(values)}, ensure_ascii=False)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            incomplete = _ends_mid_line(self.path)
            with open(self.path, "a", encoding="utf-8", errors="surrogatepass") as file:
                # One write per entry; after a kill in the middle of an entry, start a new line.
                file.write(("\n" if incomplete else "") + line + "\n")
        except OSError:
            self._works = False

    def start_over(self) -> None:
        """Renames the log of an earlier run in the same folder."""
        if self.path.exists():
            os.replace(self.path, self.path.with_suffix(".jsonl.old"))


def _ends_mid_line(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
    except OSError:  # missing or empty
        return False


def plain(value: Any) -> Any:
    """Converts a value for JSON: NaN becomes text, numbers of other libraries plain numbers, everything else text."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, bool | int | str) or value is None:
        return value
    if hasattr(value, "item") and not isinstance(value, float):
        return plain(value.item())
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return str(value)


@dataclass
class Run:
    """A run as read from its log, including resumed parts. Entries have the types of `_SCHEMA`."""

    start: dict[str, Any] = field(default_factory=dict)
    """All start entries merged, the last one's values first."""
    steps: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    waits: list[dict[str, Any]] = field(default_factory=list)
    """Which ranks waited for which: the step, the last rank to arrive, and the seconds each rank waited."""
    others: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The last entry of each other kind."""
    resumed_at: list[int] = field(default_factory=list)
    peak: float | None = None
    """Operations per second to which shares of the peak refer."""
    lines: int = 0
    """Lines of the log that are not empty."""
    bad_lines: int = 0
    """Lines that are not valid entries: incomplete after a kill, not JSON, or with values of the wrong type."""
    seconds: float = 0.0
    """Time from each start to the end, or to the last entry of a part that was killed."""
    longest_gap: float = 0.0
    """The longest time between two entries."""
    first_time: float | None = None
    """Of the first start."""
    last_time: float | None = None
    """Of the last entry with a time; None after the end of a part."""

    def add(self, entry: dict[str, Any] | None) -> None:
        """Adds the next entry of the log; None for a damaged line. `settle` must follow before the run is shown."""
        self.lines += 1
        if entry is None:
            self.bad_lines += 1
            return
        kind = entry["kind"]
        if kind == "start":
            _apply_start(self, entry)
        elif kind == "step":
            self.steps.append(entry)
        elif kind == "evaluation":
            self.evaluations.append(entry)
        elif kind == "waits":
            self.waits.append(entry)
        else:
            self.others[kind] = entry
        self._add_time(kind, entry.get("time"))

    def _add_time(self, kind: str, moment: float | None) -> None:
        if moment is None:
            return
        if self.first_time is None and kind == "start":
            self.first_time = moment
        if self.last_time is not None and kind != "start":
            gap = max(moment - self.last_time, 0.0)
            self.seconds, self.longest_gap = self.seconds + gap, max(self.longest_gap, gap)
        if self.last_time is not None or kind == "start":
            self.last_time = None if kind == "end" else moment

    def settle(self) -> None:
        """Makes all shares refer to the highest peak: a peak that proved too low was raised during the run."""
        with_share = [one for one in self.steps if number(one, "peak") and number(one, "share_of_peak") is not None]
        # In older logs a share above 1 means that training was faster than the peak known then.
        self.peak = max((one["peak"] * max(one["share_of_peak"], 1.0) for one in with_share), default=None)
        for one in with_share:
            one["share_of_peak"] *= one["peak"] / self.peak
            one["peak"] = self.peak

    @property
    def finished(self) -> bool:
        return self.others.get("end", {}).get("reason") == "finished"

    @property
    def complete(self) -> bool:
        """Whether nothing is left to do: after training, the model was saved, evaluated and described."""
        return "complete" in self.others

    @property
    def bad_lines_note(self) -> str:
        """A sentence about skipped lines; empty if there are none."""
        if not self.bad_lines:
            return ""
        were = "line is" if self.lines == 1 else f"lines {'is' if self.bad_lines == 1 else 'are'}"
        return f"{self.bad_lines:,} of {self.lines:,} {were} damaged and skipped."


Check = Callable[[Any], bool]

_LARGEST = 1e100  # far above any measurement, and far enough below the largest float to compute and plot with
_LARGEST_INT = 1 << 53  # exact as a float; matplotlib does not accept integers beyond 64 bits
_NOT_FINITE = ("nan", "inf", "-inf")  # as the log writes them
_YEAR_9999 = 253_370_764_800
_DEEPEST = 12


def _is_number(value: Any) -> TypeGuard[float]:
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) <= _LARGEST_INT
    return isinstance(value, float) and abs(value) <= _LARGEST


def number(entry: Mapping[str, Any], name: str) -> float | None:
    """The finite number under `name`; None if there is none, as for a loss that became NaN."""
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
    return isinstance(value, int)  # of any size: process ids


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _scalar(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float)


def _anything(value: Any) -> bool:
    return True


def _moment(value: Any) -> bool:
    return _amount(value) and value < _YEAR_9999  # what `time.localtime` can show


def _or_none(check: Check) -> Check:
    """Makes a field optional."""
    return lambda value: value is None or check(value)


def _list_of(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _dict_of(check: Check) -> Check:
    return lambda value: isinstance(value, dict) and all(map(check, value.values()))


def _row_of(length: int) -> Check:
    return lambda value: isinstance(value, list) and len(value) == length and all(map(_scalar, value))


def _fields(**checks: Check) -> Check:
    """An object with these fields. It may have others: scripts can log what they like."""
    return lambda value: isinstance(value, dict) and all(check(value.get(name)) for name, check in checks.items())


def _wait(row: Any) -> bool:
    """[step, last rank to arrive, seconds that rank 0 waited, seconds that rank 1 waited, ...]"""
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


_MARK = _fields(begin=_count, end=_count, label=_or_none(_scalar))
_EXAMPLE = _fields(
    question=_or_none(_text), before=_or_none(_text), context=_or_none(_text), texts=_or_none(_list_of(_text)),
    answer=_or_none(_scalar), expected=_or_none(_list_of(_scalar)), begin=_or_none(_count), end=_or_none(_count),
    probability=_or_none(_figure), marks=_or_none(_list_of(_MARK)),
)  # fmt: skip
_TABLE = _fields(
    title=_text, columns=_list_of(_scalar), rows=_list_of(_list_of(_scalar)), note=_or_none(_text),
)  # fmt: skip
_MACHINE = _fields(
    cpu=_or_none(_text), system=_or_none(_text), cores=_or_none(_count), threads=_or_none(_count),
    memory=_or_none(_amount), gflops=_or_none(_amount),
)  # fmt: skip

_PROCESS = _fields(id=_or_none(_integer), started=_or_none(_text), space=_or_none(_text))

_SCHEMA: dict[str, Check] = {
    "start": _fields(
        resumed_at=_or_none(_count), task=_or_none(_text), title=_or_none(_text), model=_or_none(_text),
        command=_or_none(_text), versions=_or_none(_dict_of(_scalar)), machine=_or_none(_MACHINE),
        data=_or_none(_text), loss=_or_none(_text), process=_or_none(_PROCESS),
        arguments=_or_none(_dict_of(_anything)), agents=_or_none(_list_of(_integer)), processes=_or_none(_list_of(_integer)),
        job=_or_none(_text), settings=_or_none(_dict_of(_anything)),
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
    # Metrics are defined by the script and may be lists or texts; `number` picks those that can be shown.
    "evaluation": _fields(step=_count),
    "examples": _fields(title=_or_none(_text), rows=_or_none(_list_of(_EXAMPLE))),
    "tables": _fields(tables=_or_none(_list_of(_TABLE))),
    "exports": _fields(tables=_or_none(_list_of(_TABLE))),
    "waits": _fields(step=_count, rows=_or_none(_list_of(_wait))),
    "speed": _fields(
        sides=_dict_of(_both(bool, _list_of(_positive))), ratio=_or_none(_figure), note=_or_none(_text),
    ),
    "trained": _fields(step=_or_none(_count), train_runtime=_or_none(_figure)),
    "end": _fields(reason=_or_none(_text), step=_or_none(_count)),
}  # fmt: skip
"""The fields of each kind of entry. Other kinds may contain anything: the page does not show them."""


def _is_shallow(value: Any, left: int = _DEEPEST) -> bool:
    """Whether a value can be shown as text: `str` fails on deeply nested values."""
    if not isinstance(value, list | dict):
        return True
    items = value.values() if isinstance(value, dict) else value
    return left > 0 and all(_is_shallow(item, left - 1) for item in items)


def parse_entry(line: str) -> dict[str, Any] | None:
    """The entry in a line; None if the line is damaged."""
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
        run.add(entry)
    run.settle()
    return run


def read_entries(path: Path) -> Iterator[dict[str, Any] | None]:
    """The entries of a log, with None for each damaged line. Raises OSError if the file cannot be read."""
    require_regular(path)
    with open(path, encoding="utf-8-sig", errors="replace") as file:
        yield from map(parse_entry, filter(str.strip, file))


def require_regular(path: Path) -> os.stat_result:
    """The status of a regular file; OSError for anything else, because a pipe or a device may never end."""
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return found


def _apply_start(run: Run, entry: dict[str, Any]) -> None:
    step = entry.get("resumed_at") or 0
    if run.start:
        run.resumed_at.append(step)
    run.start = {**run.start, **entry}
    run.steps = [one for one in run.steps if one["step"] <= step]
    run.evaluations = [one for one in run.evaluations if one["step"] <= step]
    run.waits = [one for one in run.waits if one["step"] <= step]
    for kind in ("end", "complete"):
        run.others.pop(kind, None)
