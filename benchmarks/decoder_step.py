"""One training step of a language model: stock transformers, padded and flattened, against Stoker.

    python benchmarks/decoder_step.py                                every case, about an hour on two cores
    python benchmarks/decoder_step.py --case smollm2-lora --steps 5  one of them
    python benchmarks/decoder_step.py --side "stoker bf16" ...       only these sides
    python benchmarks/decoder_step.py --case smollm2-lora --side stoker --side "stoker frozen nf4"      frozen weights in 4 bits
    python benchmarks/decoder_step.py --case qwen-lora --layers 6    fewer layers, where stock needs more memory than there is

"Padded" pads to the longest row of the batch (or to a given length), as transformers' collator does. "Flattened" is the stock
model fed one row with restarting position_ids, as DataCollatorWithFlattening and TRL's padding_free make it. Labels are the
answers' tokens. Weights are random, the token counts real (benchmarks/lengths.py). Sides take their steps in turn, each in a
process of its own (benchmarks/sides.py). "Products alone" are the products that no exact step can do without, on real tokens,
each by the fastest engine here. Prints a table and writes JSON; seconds are medians, ratios medians of those within a step.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lengths import ALPACA
from sides import Measured, Step, measure
from training_step import optimized_step, stock_step

from stoker.bench.decoder_step import Case, Rows, batch, build_model, loss_of

__all__ = ["CASES", "Case", "batch", "build_model", "loss_of", "products_alone", "stock", "stoker"]
# other scripts start from these

# 1,200 tokens in 8 rows that are padded to 512, 60% of them labelled
CHAT: Rows = ((512, 307), (60, 36), (110, 66), (95, 57), (130, 78), (83, 50), (140, 84), (70, 42))

CASES = {
    "smollm2-full": Case("SmolLM2-135M, all weights, Alpaca rows, batch 8", "smollm2", False, ALPACA),
    "smollm2-lora": Case("SmolLM2-135M, LoRA r=16, Alpaca rows, batch 8", "smollm2", True, ALPACA),
    "qwen-lora": Case("Qwen2.5-0.5B, LoRA r=16, 1,200 of 4,096 tokens", "qwen2.5", True, (CHAT,), 512),
    "smollm2-chat": Case("SmolLM2-135M, all weights, 1,200 of 4,096 tokens", "smollm2", False, (CHAT,), 512),
    "one-row": Case("SmolLM2-135M, all weights, one row of 512, all labelled", "smollm2", False, (((512, 512),),)),
}


def stock(case: Case, flat: bool = False, autocast: bool = False) -> Step:
    return stock_step(build_model(case), loss_of(case, flat), autocast=autocast, lr=1e-5)


def stoker(case: Case, dtype: str = "float32", **switches: Any) -> Step:
    return optimized_step(build_model(case), loss_of(case, flat=False), dtype, lr=1e-5, **switches)


def products_alone(case: Case, dtype: str = "float32") -> Step:
    """The matrix products of a step on real tokens, without those of frozen weights' gradients."""
    import torch
    from torch import nn

    import stoker.kernels.linear as layers
    from stoker.model import memory

    memory.keep_mapped()
    kind = getattr(torch, dtype)
    model = build_model(case)
    config = model.config
    linears = [m for m in model.modules() if isinstance(m, nn.Linear) and m is not model.get_output_embeddings()]
    head = model.get_output_embeddings().weight.detach()
    heads = config.num_attention_heads
    size = config.hidden_size // heads

    def products(weight: Any, rows: int, trains: bool) -> None:
        x, dy = (torch.empty(rows, n, dtype=kind) for n in (weight.shape[1], weight.shape[0]))
        layers._linear(x, [weight], [], [], "")
        layers.input_gradient([dy], [weight], [], "")
        if trains:
            layers.weight_gradient(dy, x, torch.float32, "")

    def step(number: int) -> None:
        rows = case.batches[number % len(case.batches)]
        tokens, labelled = sum(n for n, _ in rows), sum(n for _, n in rows)
        with torch.no_grad():
            for linear in linears:
                products(linear.weight, tokens, linear.weight.requires_grad)
            products(head, labelled, not case.lora)
            for _ in range(config.num_hidden_layers):
                for length, _ in rows:  # half of the square: attention is causal
                    tall, wide = torch.empty(heads, length, size), torch.empty(heads, length // 2, length)
                    for _ in range(3):
                        torch.bmm(tall[:, : length // 2], tall.transpose(1, 2))
                        torch.bmm(wide, tall)

    return step


def sides_of(case: Case, chosen: list[str] | None) -> dict[str, Callable[[], Step]]:
    part = functools.partial
    everything: dict[str, Callable[[], Step]] = {
        "stock padded": part(stock, case),
        "stock flattened": part(stock, case, flat=True),
        "stoker": part(stoker, case),
        "products alone": part(products_alone, case),
    }
    on_request = {
        "stoker bf16": part(stoker, case, dtype="bfloat16"),
        "stock bf16 padded": part(stock, case, autocast=True),
        "stock bf16 flattened": part(stock, case, flat=True, autocast=True),
        "bf16 products alone": part(products_alone, case, dtype="bfloat16"),
        "stoker frozen bf16": part(stoker, case, frozen_weights="bfloat16"),
        "stoker frozen int8": part(stoker, case, frozen_weights="int8"),
        "stoker frozen nf4": part(stoker, case, frozen_weights="nf4"),
        "without fuse_loss": part(stoker, case, fuse_loss=False),
        "without fuse": part(stoker, case, fuse=False),
        "without unpad": part(stoker, case, unpad=False),
    }
    return everything if chosen is None else {s: b for s, b in {**everything, **on_request}.items() if s in chosen}


def table(case: Case, results: dict[str, Measured]) -> str:
    base = next((measured for measured in results.values() if not measured.note), Measured())
    lines = [case.title, f"{'side':24}{'step':>10}{'faster':>9}{'memory':>10}"]
    for side, measured in results.items():
        lines.append(
            f"{side:24}{'-':>10}   {measured.note}"
            if measured.note
            else f"{side:24}{measured.median:9.3f}s{measured.faster_than(base):8.2f}x"
            f"{measured.peak_bytes / base.peak_bytes:9.2f}x"
        )
    if "stoker" in results and "stock flattened" in results:
        lines.append(
            f"stoker is {results['stoker'].faster_than(results['stock flattened']):.2f}x as fast as stock flattened"
        )
    if "stoker" in results and "products alone" in results:
        lines.append(f"stoker is at {results['stoker'].faster_than(results['products alone']):.2f} of its limit")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", action="append", choices=list(CASES), help="default: all of them")
    parser.add_argument("--side", action="append", help="only these sides")
    parser.add_argument("--layers", type=int, help="build the models with this number of layers (default: all)")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=2, help="steps of each side before the timed ones (default 2)")
    parser.add_argument("--out", type=Path, help="file for the figures as JSON")
    arguments = parser.parse_args()
    everything = {}
    for name in arguments.case or list(CASES):
        case = CASES[name]
        if arguments.layers:
            title = f"{case.title}, {arguments.layers} layers"
            case = dataclasses.replace(case, title=title, layers=arguments.layers)
        print(case.title, flush=True)
        results = measure(
            sides_of(case, arguments.side), arguments.steps, arguments.warm_up, lambda line: print(line, flush=True)
        )
        everything[name] = {side: measured.to_dict() for side, measured in results.items()}
        print(table(case, results) + "\n", flush=True)
    if arguments.out:
        arguments.out.write_text(
            json.dumps({"machine": platform.machine(), "cpus": os.cpu_count(), "cases": everything}, indent=1)
        )


if __name__ == "__main__":
    main()
