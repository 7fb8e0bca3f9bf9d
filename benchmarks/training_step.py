"""One training step as transformers' Trainer takes it, stock or with Stoker: src/stoker/bench/trainer_step.py."""

from __future__ import annotations

from stoker.bench.trainer_step import LossOf, optimized_step, stock_step

__all__ = ["LossOf", "optimized_step", "stock_step"]
