"""Which rows a report shows: some that the model got right and some that it got wrong, spread over the data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["right_and_wrong", "spread"]


def spread(count: int, most: int) -> list[int]:
    """At most `most` of the numbers below `count`, at equal distances."""
    return [int(n) for n in np.unique(np.linspace(0, count - 1, min(count, most)).astype(int))]


def right_and_wrong(rows: Sequence[dict[str, Any]], most: int = 6) -> list[dict[str, Any]]:
    """At most `most` rows whose `right` is true, then at most as many of the others."""
    parts = ([row for row in rows if row["right"]], [row for row in rows if not row["right"]])
    return [part[n] for part in parts for n in spread(len(part), most)]
