"""Collects rows that cannot be used, reports the first few with their position, and stops if there are too many."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from stoker.errors import UserError

__all__ = ["SHARE_ALLOWED", "Faults"]

SHARE_ALLOWED = 0.01
"""With a larger share of unusable rows, the file is assumed to be wrong."""
_SHOWN = 5

log = logging.getLogger("stoker")


@dataclass
class Faults:
    """Collects the bad rows of one file."""

    source: str
    """The file, as the user named it."""
    strict: bool = False
    """Stop at the first bad row."""
    count: int = 0
    shown: list[str] = field(default_factory=list)

    def add(self, where: str, what: str) -> None:
        sentence = f"{where}: {what}"
        if self.strict:
            raise UserError(f"{sentence} (stopped at the first bad row because of --strict)")
        self.count += 1
        if len(self.shown) < _SHOWN:
            self.shown.append(sentence)

    def too_many(self, good: int) -> bool:
        return self.count > SHARE_ALLOWED * (good + self.count)

    def settle(self, good: int) -> None:
        """Warns about the rows that were skipped; raises UserError if they are more than `SHARE_ALLOWED` of all rows."""
        if not self.count:
            return
        total = good + self.count
        details = "".join(f"\n  {line}" for line in self.shown)
        if self.count > len(self.shown):
            details += f"\n  and {self.count - len(self.shown)} more"
        finding = f"{self.count:,} of {total:,} rows in {self.source} cannot be used"
        if self.too_many(good):
            raise UserError(f"{finding}, more than {SHARE_ALLOWED:.0%}; repair the file or remove those rows:{details}")
        log.warning("%s and are skipped:%s", finding, details)
