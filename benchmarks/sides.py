"""Several sides of a comparison in one run, each in a process of its own, steps taken in turn: src/stoker/bench/sides.py."""

from __future__ import annotations

from stoker.bench.sides import Measured, Step, measure

__all__ = ["Measured", "Step", "measure"]
