"""How the step of one process divides among its cores: the part that no core shares, and how evenly the rest is cut.

    seconds on P cores = host_seconds(P) + work / (P * efficiency(P, tokens))

The numbers are from `python benchmarks/many_cores.py`, which runs the kernels on virtual threads; docs/machines.md has its
figures and says what they leave out (memory bandwidth that cores share, caches, clocks, NUMA). `stoker.hf.step_cost` uses them
for every estimate of time, so `stoker plan` and `stoker train sft` agree.
"""

from __future__ import annotations

import math
from itertools import pairwise

__all__ = ["efficiency", "host_seconds"]

_EFFICIENCY = ((1, 1.0), (2, 0.99), (8, 0.96), (16, 0.92), (32, 0.85), (56, 0.77), (112, 0.60))
"""By cores: the share of their time in which they work, the least of three cases: BERT-base, MiniLM and SmolLM2 with LoRA."""
_TOKENS = 18
"""Per core: those of the figures with the most cores, about 2,000 on 112. Cores beyond that are taken to be idle."""
_STEP, _LAYER = 8e-3, 50e-6
"""Seconds of host time per step, and per linear layer, forward and backward: Python, autograd, describing the kernels. A BERT of
12 layers so narrow that arithmetic vanishes takes 6 ms, a Llama of 30 with LoRA 14 (benchmarks/host_time.py). Steps of full size,
whose data displaces Python's from the caches, took 23 and 40 ms beside other programs. These numbers give 12 and 40 ms."""
_REGIONS = 6
"""Parallel regions per linear layer, forward and backward, those of attention and norms included: 10 in BERT, 5 with LoRA."""
_WAKING, _THREAD = 1e-6, 0.1e-6
"""Seconds for waking threads and waiting for the last, and for each of them. Assumed, not measured with many cores."""


def efficiency(cores: float, tokens: float) -> float:
    """work / (cores x time) of all kernels together, in a process that trains on so many tokens per step."""
    used = max(1.0, min(cores, tokens / _TOKENS))
    return used / max(cores, 1.0) * _share(used)


def _share(cores: float) -> float:
    """More cores than the figures have are taken to be no faster."""
    most, least = _EFFICIENCY[-1]
    for (few, high), (many, low) in pairwise(_EFFICIENCY):
        if cores <= many:
            return high + math.log(cores / few) / math.log(many / few) * (low - high)
    return least * most / cores


def host_seconds(linear_layers: int, cores: float) -> float:
    """Seconds of a step that do not become fewer with more cores, for a model with so many linear layers, adapters included."""
    waking = _WAKING + _THREAD * cores if cores > 1 else 0.0
    return _STEP + linear_layers * (_LAYER + _REGIONS * waking)
