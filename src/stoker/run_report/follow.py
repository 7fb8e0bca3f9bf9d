"""Follows the log of a run while it is written, possibly by another machine through a shared folder.

Each poll opens the file anew, which makes network file systems look for changes. A line counts when its newline is there. A log
that was replaced or cut, as by a run that starts over, is read again from its beginning.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from stoker.run_report.log import NAME, Run, parse_entry, require_regular

__all__ = ["LogFollower"]

PIECE = 1 << 22
LONGEST_LINE = 1 << 24
_COMPARED = 256  # bytes before the place reached: if they have changed, the log was rewritten
ENTRIES_KEPT = 20_000
ROWS_KEPT = 50_000


class LogFollower:
    """The run in a folder as far as it is logged; `poll` reads on."""

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder) / NAME
        self.run = Run()
        self.problem = ""
        """Why the log cannot be read at present; empty if it can."""
        self._file: tuple[int, int] | None = None
        self._begin_again()

    def poll(self) -> bool:
        """Reads what has been added; returns whether the run has changed."""
        before = self.run, self.run.lines, self.problem
        try:
            found = require_regular(self.path)
            with open(self.path, "rb") as file:
                if self._is_another(file, found):
                    self._begin_again()
                self._file = found.st_dev, found.st_ino
                self._read(file)
            self.problem = ""
        except FileNotFoundError:
            self.problem = f"there is no {self.path.name} in the folder"
        except OSError as error:
            self.problem = f"{self.path.name} cannot be read: {error.strerror or error}"
        changed = before != (self.run, self.run.lines, self.problem)
        if changed:
            self._keep_within_limits()
            self.run.settle()
        return changed

    @property
    def quiet_for(self) -> float:
        """Seconds since the last entry, by this machine's clock."""
        return time.monotonic() - self._news_at

    def _begin_again(self) -> None:
        self.run = Run()
        self._file = None
        self._offset = 0
        self._last_bytes = b""
        self._skips_line = False
        self._news_at = time.monotonic()

    def _is_another(self, file: Any, found: os.stat_result) -> bool:
        if self._file is None:
            return False
        if self._file != (found.st_dev, found.st_ino) or found.st_size < self._offset:
            return True
        file.seek(self._offset - len(self._last_bytes))
        return bool(file.read(len(self._last_bytes)) != self._last_bytes)

    def _read(self, file: Any) -> None:
        first = self._offset == 0
        while True:
            file.seek(self._offset)
            piece = file.read(PIECE)
            end = piece.rfind(b"\n") + 1
            if not end and len(piece) == PIECE:
                piece += file.read(LONGEST_LINE - PIECE)
                end = piece.rfind(b"\n") + 1
                if not end and len(piece) == LONGEST_LINE:  # no entry is this long
                    end, self._skips_line = len(piece), True
                    self._advance(piece)
                    continue
            if not end:
                break
            self._add_lines(piece[:end])
            self._advance(piece[:end])
        if first and self.run.last_time is not None:
            # The clock of another machine may be ahead.
            self._news_at = time.monotonic() - max(time.time() - self.run.last_time, 0.0)

    def _advance(self, piece: bytes) -> None:
        self._offset += len(piece)
        self._last_bytes = (self._last_bytes + piece[-_COMPARED:])[-_COMPARED:]
        self._news_at = time.monotonic()

    def _add_lines(self, data: bytes) -> None:
        lines = data.decode("utf-8-sig" if self._offset == 0 else "utf-8", errors="replace").split("\n")
        if self._skips_line:
            lines[0], self._skips_line = "damaged", False
        for line in lines:
            if line.strip():
                self.run.add(parse_entry(line))

    def _keep_within_limits(self) -> None:
        """Thins out the older entries of a very long run: curves need no more, and memory stays bounded."""
        run = self.run
        for entries in (run.steps, run.evaluations, run.waits):
            if len(entries) > ENTRIES_KEPT:
                _thin(entries, ENTRIES_KEPT)
        while len(run.waits) > 8 and sum(len(one.get("rows") or ()) for one in run.waits) > ROWS_KEPT:
            _thin(run.waits, len(run.waits))


def _thin(entries: list[dict[str, Any]], most: int) -> None:
    """Leaves the last quarter of `most`, and before it half of `most`, spread evenly over the steps."""
    older = entries[: -(most // 4)]
    parts, last = most // 2, max(one["step"] for one in older) + 1
    kept = {one["step"] * parts // last: one for one in reversed(older)}
    entries[: len(older)] = reversed(kept.values())
