"""Rows that cannot be used: counted, the first few shown with file and position, and a limit on how many are bearable."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from stoker.errors import UserError

__all__ = ["SHARE_ALLOWED", "Faults"]

SHARE_ALLOWED = 0.01
"""A data set with more unusable rows than this is taken for a mistake, not for noise."""
_SHOWN = 5

log = logging.getLogger("stoker")


@dataclass
class Faults:
    """Collects the bad rows of one file."""

    source: str
    """The file, as the person named it."""
    strict: bool = False
    """Stop at the first."""
    count: int = 0
    shown: list[str] = field(default_factory=list)

    def add(self, where: str, what: str) -> None:
        sentence = f"{where}: {what}"
        if self.strict:
            raise UserError(f"{sentence} (stopped at the first bad row because of --strict)")
        self.count += 1
        if len(self.shown) < _SHOWN:
            self.shown.append(sentence)

    def settle(self, good: int) -> None:
        """Says what was left out; raises UserError if it was too much of `good` and bad rows together."""
        if not self.count:
            return
        total = good + self.count
        details = "".join(f"\n  {line}" for line in self.shown)
        if self.count > len(self.shown):
            details += f"\n  and {self.count - len(self.shown)} more"
        finding = f"{self.count:,} of {total:,} rows in {self.source} cannot be used"
        if self.count > SHARE_ALLOWED * total:
            raise UserError(
                f"{finding}, more than {SHARE_ALLOWED:.0%}; repair the file or leave those rows out:{details}"
            )
        log.warning("%s and are left out:%s", finding, details)
