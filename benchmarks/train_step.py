"""One training step: stock transformers against Stoker, and against the time of the step's matrix products alone.

    python benchmarks/train_step.py                                  every case, about half an hour on two cores
    python benchmarks/train_step.py --case bert-qa --steps 7         one of them
    python benchmarks/train_step.py --case minilm-qa --ablate        each part of optimize switched off in turn
    python benchmarks/train_step.py --case bert-qa --profile         the shares of products, attention, casts, optimizer, ...
    python benchmarks/train_step.py --before ../earlier/src ../earlier/build/native   an earlier version beside this one

The stock side is the step of HF's Trainer as run_qa.py starts it: forward, backward, clipping at 1.0, fused AdamW, padded to
max_seq_length for QA and to the longest of the batch for MRPC. All sides see the same token counts (benchmarks/lengths.py) and
take their steps in turn, each in a process of its own (benchmarks/sides.py). Prints a table, writes JSON and a plot.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lengths import MRPC, SQUAD
from sides import Measured, Step, measure
from step_profile import shares
from training_step import optimized_step, stock_step

from stoker.bench.encoder_step import HEADS, MASKED, MORE, NO_DROPOUT, Case, batch, build_model, loss_of

__all__ = ["CASES", "NO_DROPOUT", "Case", "batch", "build_model", "loss_of", "products_alone", "stock", "stoker"]
# other scripts start from these

CASES = {
    "bert-qa": Case("BERT-base, SQuAD, batch 12, max 384", 768, 12, "qa", SQUAD, 384),
    "minilm-qa": Case("MiniLM-L6, SQuAD, batch 12, max 384", 384, 6, "qa", SQUAD, 384),
    "bert-mrpc": Case("BERT-base, MRPC, batch 16", 768, 12, "classify", MRPC, None),
    "minilm-mrpc": Case("MiniLM-L6, MRPC, batch 16", 384, 6, "classify", MRPC, None),
    "deberta-qa": Case("DeBERTa-v3-small, SQuAD, batch 12, max 384", 768, 6, "qa", SQUAD, 384, "DebertaV2"),
    "bert-mlm": Case("BERT-base, masked LM, 4 full rows of 512", 768, 12, "mlm", ((512,) * 4,), None),
    "deberta-mrpc": Case("DeBERTa-v3-small, MRPC, batch 16", 768, 6, "classify", MRPC, None, "DebertaV2"),
}


def stock(name: str, dynamic: bool = False, autocast: bool = False, dropout: bool = True) -> Step:
    case = CASES[name]
    pad_to = None if dynamic else case.pad_to
    return stock_step(build_model(case, dropout), loss_of(case, pad_to), autocast=autocast)


def compiled(name: str) -> Step:
    import torch

    case = CASES[name]
    return stock_step(build_model(case), loss_of(case, case.pad_to), lambda model, _: torch.compile(model))


def stoker(name: str, dtype: str = "float32", dropout: bool = True, **switches: Any) -> Step:
    case = CASES[name]
    # Stoker's own collator would not pad to the maximum, but stock's does, and it must not matter.
    return optimized_step(build_model(case, dropout), loss_of(case, case.pad_to), dtype, **switches)


def every_token(name: str) -> Step:
    """Stoker's step of a classifier whose last layer computes all tokens to the end, though its head reads one of each row."""
    from stoker.model.class_swap import restore_class

    case = CASES[name]
    model = build_model(case)
    step = optimized_step(model, loss_of(case, case.pad_to))
    restore_class(model)
    return step


def one_engine(name: str, engine: str) -> Step:
    """Stoker's step with all products of linear layers by one engine instead of the fastest for each shape."""
    os.environ["STOKER_LINEAR_ENGINE"] = engine
    return stoker(name)


def before(build: Callable[[], Step], source: str, native: str) -> Step:
    """`build` with another version of Stoker: the `src/` folder of its checkout, and the folder of its native libraries."""
    sys.path.insert(0, source)
    os.environ["STOKER_NATIVE_DIR"] = native
    # What this script itself needs of this version (stoker.bench) is loaded and stays; whatever is imported from here on is the
    # other version's.
    for name in [name for name in sys.modules if name.partition(".")[0] == "stoker"]:
        del sys.modules[name]
    return build()


def products_alone(name: str, dtype: str = "float32", engine: str = "auto") -> Step:
    """The matrix products no exact training step can do without, on real tokens only.

    Those of linear layers are multiplied by `engine`, "auto" for the fastest here. A classifier's last layer needs those after
    attention for one token of each row.
    """
    os.environ["STOKER_LINEAR_ENGINE"] = engine
    import torch

    import stoker.kernels.linear as layers
    from stoker.model import memory

    memory.keep_mapped()
    case = CASES[name]
    width, size = case.hidden, case.hidden // HEADS
    kind = getattr(torch, dtype)
    weights = [
        torch.randn(out, inp, dtype=kind)
        for out, inp in ((3 * width, width), (width, width), (4 * width, width), (width, 4 * width))
    ]
    relative = case.family == "DebertaV2"
    both = torch.randn(2 * width, width, dtype=kind)  # the projections of relative positions
    vocabulary = torch.randn(MORE[case.family]["vocab_size"] if case.task == "mlm" else 0, width, dtype=kind)

    def all_three(rows: int, weight: torch.Tensor) -> None:
        x, dy = (torch.empty(rows, n, dtype=kind) for n in (weight.shape[1], weight.shape[0]))
        layers._linear(x, [weight], [], [], "")
        layers.input_gradient([dy], [weight], [], "")
        layers.weight_gradient(dy, x, torch.float32, "")

    def step(number: int) -> None:
        lengths = case.lengths[number % len(case.lengths)]
        if case.task == "mlm":  # the head, on masked tokens only
            for weight in (weights[1], vocabulary):
                all_three(round(MASKED * sum(lengths)), weight)
        for layer in range(case.layers):
            one_token = case.task == "classify" and layer == case.layers - 1
            for number, weight in enumerate(weights):
                all_three(len(lengths) if one_token and number else sum(lengths), weight)
            if relative:
                all_three(min(2 * max(lengths) - 1, 2 * MORE[case.family]["position_buckets"]), both)
            for length in lengths:
                tall, wide = (torch.empty(HEADS, length, columns, dtype=kind) for columns in (size, length))
                # scores and context, and the two products of each one's gradient; scores of relative positions twice more
                for _ in range(6 if relative else 3):
                    torch.bmm(tall, tall.transpose(1, 2))
                    torch.bmm(wide, tall)

    return step


def bf16_units() -> bool:
    from stoker.kernels.microkernels import torch_has_bf16_units

    return torch_has_bf16_units()


def sides_of(
    name: str, chosen: list[str] | None, ablate: bool, earlier: tuple[str, str] | None
) -> dict[str, Callable[[], Step]]:
    part = functools.partial
    if earlier:
        now = {"stoker": part(stoker, name), "stoker bf16": part(stoker, name, dtype="bfloat16")}
        return {
            "stock": part(stock, name),
            **now,
            **{f"{side}, before": part(before, build, *earlier) for side, build in now.items()},
        }
    if ablate:
        return {
            "stoker": part(stoker, name),
            "without unpad": part(stoker, name, unpad=False),
            "without fuse": part(stoker, name, fuse=False),
            "without memory": part(stoker, name, memory=False),
            "products by torch.mm": part(one_engine, name, "torch"),
            "products by own tiles": part(one_engine, name, "stoker"),
            **({"every token": part(every_token, name)} if CASES[name].task == "classify" else {}),
            "stock": part(stock, name),
        }
    everything: dict[str, Callable[[], Step]] = {"stock": part(stock, name)}
    if CASES[name].pad_to:
        everything["stock, dynamic padding"] = part(stock, name, dynamic=True)
        everything["stock, torch.compile"] = part(compiled, name)
    everything["stoker"] = part(stoker, name)
    everything["stoker bf16"] = part(stoker, name, dtype="bfloat16")
    everything["products alone"] = part(products_alone, name)
    everything["torch.mm products"] = part(products_alone, name, engine="torch")
    if chosen or bf16_units():  # else minutes per step, so only on request
        everything["stock bf16"] = part(stock, name, autocast=True)
        everything["bf16 products alone"] = part(products_alone, name, dtype="bfloat16")
    if bf16_units():
        everything["torch.mm bf16 products"] = part(products_alone, name, dtype="bfloat16", engine="torch")
    return {side: build for side, build in everything.items() if chosen is None or side in chosen}


LIMITS = {
    "stoker": ("products alone", "torch.mm products"),
    "stoker bf16": ("bf16 products alone", "torch.mm bf16 products"),
}
"""Sides, and the sides whose time their own cannot be below; products faster than torch.mm's may go below the second."""


def table(name: str, results: dict[str, Measured]) -> str:
    base = results.get("stock") or next(iter(results.values()))
    lines = [f"{CASES[name].title}", f"{'side':24}{'step':>10}{'faster':>9}{'memory':>10}{'faults':>10}"]
    for side, measured in results.items():
        figures = measured.to_dict()
        if measured.note:
            lines.append(f"{side:24}{'-':>10}   {measured.note}")
            continue
        lines.append(
            f"{side:24}{measured.median:9.3f}s{measured.faster_than(base):8.2f}x"
            f"{measured.peak_bytes / base.peak_bytes:9.2f}x{figures['faults_per_step']:10.0f}"
        )
    for mine, limits in LIMITS.items():
        for limit in limits:
            if mine in results and limit in results:
                share = results[mine].faster_than(results[limit])
                lines.append(f"{mine} is at {share:.2f} of the limit set by {limit}")
    if "stoker bf16" in results and "stock bf16" in results:
        faster = results["stoker bf16"].faster_than(results["stock bf16"])
        lines.append(f"stoker bf16 is {faster:.2f}x as fast as stock bf16")
    return "\n".join(lines)


def plot(everything: dict[str, dict[str, Measured]], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.family": "sans-serif", "svg.hashsalt": "stoker", "svg.fonttype": "none"})
    figure, axes = plt.subplots(len(everything), 1, figsize=(8, 1.2 + 1.9 * len(everything)), squeeze=False)
    colours = {
        "stoker": "#d9480f",
        "stoker bf16": "#f08c00",
        "products alone": "#adb5bd",
        "torch.mm products": "#ced4da",
    }
    for axis, (name, results) in zip(axes[:, 0], everything.items(), strict=True):
        shown = {side: measured for side, measured in results.items() if measured.seconds}
        base = shown.get("stock", next(iter(shown.values())))
        bars = axis.barh(
            list(shown), [m.median for m in shown.values()], color=[colours.get(side, "#495057") for side in shown]
        )
        axis.bar_label(
            bars, [f"{m.median:.2f} s  {m.faster_than(base):.1f}x" for m in shown.values()], padding=4, fontsize=8
        )
        axis.set_title(CASES[name].title, loc="left", fontsize=10)
        axis.invert_yaxis()
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
        axis.set_xlim(0, max(m.median for m in shown.values()) * 1.2)
    axes[-1, 0].set_xlabel("seconds per training step (median); shorter is better", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", action="append", choices=list(CASES), help="default: all of them")
    parser.add_argument("--side", action="append", help="only these sides")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=3, help="steps of each side before the timed ones (default 3)")
    parser.add_argument("--ablate", action="store_true", help="switch off one part of optimize at a time")
    parser.add_argument("--profile", action="store_true", help="only show where the time of Stoker's step goes")
    parser.add_argument("--before", nargs=2, metavar=("SRC", "NATIVE"), help="measure another version of Stoker too")
    parser.add_argument("--out", type=Path, help="folder for train_step.json and train_step.svg")
    arguments = parser.parse_args()
    everything = {}
    for name in arguments.case or list(CASES):
        print(CASES[name].title, flush=True)
        if arguments.profile:
            for side in arguments.side or ("stoker", "stoker bf16"):
                found = shares(sides_of(name, [side], False, None)[side](), arguments.warm_up, arguments.steps)
                print(f"  {side}: " + ", ".join(f"{kind} {share:.0%}" for kind, share in found.items()), flush=True)
            continue
        sides = sides_of(name, arguments.side, arguments.ablate, arguments.before)
        everything[name] = measure(sides, arguments.steps, arguments.warm_up, lambda line: print(line, flush=True))
        print(table(name, everything[name]) + "\n", flush=True)
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        figures = {name: {side: m.to_dict() for side, m in results.items()} for name, results in everything.items()}
        (arguments.out / "train_step.json").write_text(json.dumps({"cpus": os.cpu_count(), "cases": figures}, indent=1))
        plot(everything, arguments.out / "train_step.svg")


if __name__ == "__main__":
    main()
