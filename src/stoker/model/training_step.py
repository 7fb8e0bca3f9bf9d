"""Measures one training step in fp32 and in bf16 on this machine, with a small encoder and `stoker.optimize`.

A matrix product alone does not show which precision trains faster: normalization, attention, the optimizer and the
conversion of weights matter too. The result is a `stoker.machine.rates.TrainingStep`; the caller saves it.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from stoker.machine import Machine, load
from stoker.machine.rates import TrainingStep, installed_version
from stoker.model.optimize import optimize

__all__ = ["in_turn", "measure_training_step", "sides", "size_for"]

_ROWS, LENGTH = 12, 128  # as many tokens as a typical batch: with fewer, the optimizer would dominate
_FEW_ROWS = 3  # where twelve would take too long
_ALL_ROWS_FROM = 100.0  # GFLOP/s in fp32: a step of twelve rows takes about half a second there
_LAYERS = 2
SMALL_WIDTH, BASE_WIDTH = 384, 768  # widths of MiniLM and of BERT-base
_BASE_FROM = 1000.0  # GFLOP/s in fp32: slower machines would take ten seconds at the larger width
_WARM_UP = 2  # rounds: the first chooses the engines for the products, the second fills the optimizer's caches
_ROUNDS = (3, 31)
_MEMORY = 2 << 30  # bytes: two models with gradients, AdamW state and activations need 1 GB at width 768

Step = Callable[[], None]


def measure_training_step(machine: Machine, fp32_gflops: float, *, seconds: float = 2.0) -> TrainingStep:
    """Measures for about `seconds` after warm-up, alternating between the two precisions; returns medians.

    The thread count and the random state are restored; the allocator settings of `optimize` stay. Raises RuntimeError or
    ImportError with a one-sentence reason if it cannot measure.
    """
    available = [size for size in (machine.memory_available, machine.usable_memory) if size is not None]
    if available and min(available) < _MEMORY:
        raise RuntimeError(
            f"only {min(available) / 2**30:.1f} GB of memory are available; {_MEMORY >> 30} GB are needed"
        )
    width, rows = size_for(fp32_gflops)
    before = torch.get_num_threads()
    others = load.others_during()
    torch.set_num_threads(machine.usable_threads)
    try:
        with torch.random.fork_rng(devices=[]):  # measuring must not change the caller's random state
            fp32, bf16 = sides(width, rows)
            times = in_turn(fp32, bf16, seconds)
    finally:
        torch.set_num_threads(before)
    return TrainingStep(
        fp32=round(statistics.median(times[0]), 6),
        bf16=round(statistics.median(times[1]), 6),
        width=width,
        layers=_LAYERS,
        tokens=rows * LENGTH,
        rounds=len(times[0]),
        stoker=installed_version("stoker"),
        measured=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        disturbed=(watched := others()) is not None and watched.disturbs,
    )


def size_for(fp32_gflops: float) -> tuple[int, int]:
    """Width of the model and rows of a batch, such that a step takes neither too long nor too little time to measure."""
    width = BASE_WIDTH if fp32_gflops >= _BASE_FROM else SMALL_WIDTH
    return width, max(_FEW_ROWS, min(_ROWS, round(_ROWS * fp32_gflops / _ALL_ROWS_FROM)))


def sides(width: int, rows: int) -> tuple[Step, Step]:
    """A function for each precision that runs one training step of the same model."""
    try:
        from transformers import BertConfig, BertForSequenceClassification
    except ImportError as error:
        raise ImportError(f"transformers cannot be imported ({error}); pip install 'stoker[hf]'") from error

    config = BertConfig(
        vocab_size=1024,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=_LAYERS,
        num_attention_heads=width // 64,
    )
    model = BertForSequenceClassification(config).train()
    ids = torch.randint(0, config.vocab_size, (rows, LENGTH))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids[:, 0] % 2}
    return _side(copy.deepcopy(model), torch.float32, inputs), _side(model, torch.bfloat16, inputs)


def _side(model: Any, dtype: torch.dtype, inputs: dict[str, torch.Tensor]) -> Step:
    model, optimizer = optimize(model, torch.optim.AdamW(model.parameters(), lr=1e-5), dtype=dtype)

    def step() -> None:
        model(**inputs).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def in_turn(fp32: Step, bf16: Step, seconds: float) -> tuple[list[float], list[float]]:
    """Seconds of each step. The sides alternate, so that other load on the machine affects both."""
    for _ in range(_WARM_UP):
        fp32()
        bf16()
    times: tuple[list[float], list[float]] = ([], [])
    end = time.perf_counter() + seconds
    while len(times[0]) < _ROUNDS[0] or (time.perf_counter() < end and len(times[0]) < _ROUNDS[1]):
        for step, taken in zip((fp32, bf16), times, strict=True):
            begin = time.perf_counter()
            step()
            taken.append(time.perf_counter() - begin)
    return times
