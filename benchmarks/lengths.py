"""Token counts of real examples: src/stoker/bench/lengths.py."""

from __future__ import annotations

from stoker.bench.lengths import ALPACA, MRPC, PAIRS, SQUAD

__all__ = ["ALPACA", "MRPC", "PAIRS", "SQUAD"]
