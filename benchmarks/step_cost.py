"""Seconds of a training step as `stoker plan` and `stoker train sft` predict them (`stoker.hf.step_cost`), and as measured.

    python benchmarks/step_cost.py                       every case, about five minutes on two quiet cores
    python benchmarks/step_cost.py --layers 6            smaller models
    python benchmarks/step_cost.py --cpu-time            where other programs run: CPU time, shared among the threads

Predictions are from the rate of a product that is measured between the steps, so that a machine whose speed changes does not make
them wrong. Weights and tokens are random. Prints a table of medians; a ratio of 1 is a perfect prediction.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import stoker
from stoker.hf.measured_rates import machine_rates
from stoker.hf.step_cost import Rows, Speed, StepCost
from stoker.plan.subject import Subject

_LARGE = 1536


@dataclass(frozen=True)
class Case:
    title: str
    subject: Subject
    batch: int


CASES = {
    "lora": Case("SmolLM2-135M, LoRA, 8 x 200", Subject("smollm2-135m", "sft", 200, 16, 0.5), 8),
    "full": Case("SmolLM2-135M, all weights, 8 x 200", Subject("smollm2-135m", "sft", 200, 0, 0.5), 8),
    "lora-small": Case("SmolLM2-135M, LoRA, 1 x 200", Subject("smollm2-135m", "sft", 200, 16, 0.5), 1),
    "full-small": Case("SmolLM2-135M, all weights, 1 x 200", Subject("smollm2-135m", "sft", 200, 0, 0.5), 1),
    "lora-long": Case("SmolLM2-135M, LoRA, 1 x 1600", Subject("smollm2-135m", "sft", 1600, 16, 0.5), 1),
    "lora-labelled": Case("SmolLM2-135M, LoRA, 8 x 200, all labelled", Subject("smollm2-135m", "sft", 200, 16, 1.0), 8),
    "qwen-lora": Case("Qwen2.5-0.5B, LoRA, 4 x 200", Subject("qwen2.5-0.5b", "sft", 200, 16, 0.5), 4),
    "qwen-full": Case("Qwen2.5-0.5B, all weights, 4 x 200", Subject("qwen2.5-0.5b", "sft", 200, 0, 0.5), 4),
    "bert": Case("BERT-base, questions, 12 x 160", Subject("bert-base", "qa", 160), 12),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--layers", type=int, help="instead of all of the model's")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--cpu-time", action="store_true")
    options = parser.parse_args()
    rates = machine_rates(print)
    print(f"{'case':45} {'GFLOP/s':>8} {'predicted':>10} {'measured':>9} {'ratio':>6}")
    for name in options.case:
        # In a process of its own: what the allocator keeps of one case is not there in the next.
        process = multiprocessing.get_context("spawn").Process(target=_print_case, args=(name, options, rates))
        process.start()
        process.join()


def _print_case(name: str, options: Any, rates: Any) -> None:
    case, threads = CASES[name], torch.get_num_threads()
    clock = (lambda: time.process_time() / threads) if options.cpu_time else time.perf_counter
    rate, rows, cost, seconds = _measure(case, options, clock)
    share = min(1.0, torch.get_num_threads() / rates.threads)
    predicted = cost.seconds(rows, Speed(1e9 * rate, 1e9 * rates.bandwidth_all * share))
    print(f"{case.title:45} {rate:8.0f} {predicted:8.2f} s {seconds:7.2f} s {seconds / predicted:6.2f}", flush=True)


def _measure(case: Case, options: Any, clock: Callable[[], float]) -> tuple[float, Rows, StepCost, float]:
    subject = case.subject
    model = subject.build(layers=options.layers)
    cost = StepCost.of(model)
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
    stoker.optimize(model, optimizer, dtype=torch.float32)
    seconds, rates = [], []
    for number in range(options.steps + 1):
        inputs = subject.rows(case.batch, number, model.config)
        rates.append(_product_rate(clock))
        begin = clock()
        model(**inputs).loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        model.zero_grad()
        seconds.append(clock() - begin)
    lengths = subject.lengths(case.batch, model.config)
    rows = Rows.of(lengths, subject.labelled if subject.task == "sft" else 0.0)
    return statistics.median(rates[1:]), rows, cost, statistics.median(seconds[1:])


def _product_rate(clock: Callable[[], float]) -> float:
    """GFLOP/s of a large product, the best of several: the rate to which `stoker doctor` and `stoker train` compare training."""
    a, b, c = (torch.ones(_LARGE, _LARGE) for _ in range(3))
    best = float("inf")
    for _ in range(6):
        begin = clock()
        torch.mm(a, b, out=c)
        best = min(best, clock() - begin)
    return 2 * _LARGE**3 / best / 1e9


if __name__ == "__main__":
    main()
