"""What a training step would take on many cores, computed on a few: kernels run on virtual threads, and their makespans add up.

    python benchmarks/many_cores.py                                three cases on 2 to 112 threads, about ten minutes
    python benchmarks/many_cores.py --case bert-qa --threads 56    one of them, with what its kernels lose
    python benchmarks/many_cores.py --validate                     predicts the step on two threads, and measures it
    OMP_WAIT_POLICY=passive python benchmarks/many_cores.py --validate --cpu-time    the same where other programs run
    python benchmarks/many_cores.py --layers 2                     shallower models; figures are theirs, nothing is extrapolated
    python benchmarks/many_cores.py --out docs/figures             also many_cores.json and many_cores.svg
    python benchmarks/many_cores.py --draw --out docs/figures      the plot from that JSON, and the figures that docs repeat

predicted step = host + makespans of all parallel regions + cost of waking and joining their threads + torch's own operators

Every step runs on one thread and is timed by that thread's CPU clock (stoker.kernels.virtual_threads). torch's operators are
divided as torch divides them: products evenly, others into pieces of at least 32,768 elements. What is left is host time: Python,
autograd, tokenizing, small tensors; no number of cores divides it. Left out: memory bandwidth and caches that cores share,
clocks that fall, NUMA (docs/machines.md). Exit code 1 if work / (threads x makespan) of all regions together is below 0.85 on 56
threads or 0.75 on 112, or with --validate if a prediction is more than 10% off.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bars import cpu_name
from lengths import ALPACA, SQUAD
from sides import Step

from stoker.kernels.virtual_threads import Region, virtual_threads

os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # torch's profiler announces itself
try:
    from stoker.kernels.virtual_threads import cost_of_region
except ImportError:  # until the kernels measure it themselves

    def cost_of_region(threads: int) -> float:
        """Seconds for waking and joining `threads` threads: about 1 us, and 0.1 us for each thread that is told to begin."""
        return 1e-6 + 1e-7 * threads if threads > 1 else 0.0


__all__ = ["BARS", "OFF_BY", "Operator", "Prediction", "of_run", "record"]

THREADS = (2, 8, 16, 32, 56, 112)
BARS = {56: 0.85, 112: 0.75}
"""The least work / (threads x makespan) by number of threads."""
OFF_BY = 0.10
"""How far a prediction for the threads that are there may be from the measured step."""
LARGE = 0.01
"""Regions with less of all work are not listed."""

_GRAIN = 32768  # at::internal::GRAIN_SIZE: the fewest elements that torch gives a thread
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
_SERIAL = ("sort", "nonzero", "unique", "item", "_local_scalar_dense")
_NO_WORK = (
    "slice",
    "select",
    "as_strided",
    "view",
    "squeeze",
    "unsqueeze",
    "transpose",
    "t",
    "expand",
    "narrow",
    "empty_like",
)


@dataclass(frozen=True)
class Operator:
    """Calls of one of torch's operators on tensors of one size, added up."""

    name: str
    elements: int
    """Of its largest input."""
    calls: int
    seconds: float
    """On one thread."""

    def threads(self, most: int) -> int:
        """Among how many threads torch divides it."""
        if self.name in _PRODUCTS:
            return most
        if self.name.removeprefix("aten::") in (*_SERIAL, *_NO_WORK):
            return 1
        return max(1, min(most, self.elements // _GRAIN))

    @property
    def divisible(self) -> bool:
        return self.threads(2) > 1


@dataclass(frozen=True)
class Prediction:
    """The parts of one step, in seconds."""

    threads: int
    host: float
    kernels: float
    """The makespans of all regions, one after the other."""
    waking: float
    torch: float
    work: float
    """Of all regions on one thread."""
    even: float
    """The part of the work that code which is not Stoker's divides (MKL), and that is taken as divided evenly."""
    regions: int = 0
    """How many are entered."""

    @property
    def step(self) -> float:
        return self.host + self.kernels + self.waking + self.torch

    @property
    def efficiency(self) -> float:
        return self.work / (self.threads * self.kernels) if self.kernels else 1.0

    @property
    def imbalance(self) -> float:
        """Seconds that the kernels take longer than if their work were divided evenly."""
        return max(0.0, self.kernels - self.work / self.threads)

    @property
    def missed(self) -> bool:
        return round(self.efficiency, 2) < BARS.get(self.threads, 0.0)


def of_run(
    regions: Sequence[Region],
    operators: Sequence[Operator],
    seconds: float,
    threads: int,
    cost: Callable[[int], float] = cost_of_region,
) -> Prediction:
    """The prediction from one step on virtual threads, which took `seconds`."""
    divided = [one for one in operators if one.divisible]
    woken = [(region.calls, region.threads) for region in regions]
    woken += [(one.calls, one.threads(threads)) for one in divided]
    return Prediction(
        threads=threads,
        host=max(0.0, seconds - sum(region.measured for region in regions) - sum(one.seconds for one in divided)),
        kernels=sum(region.makespan for region in regions),
        waking=sum(calls * cost(count) for calls, count in woken if count > 1),
        torch=sum(one.seconds / one.threads(threads) for one in divided),
        work=sum(region.work for region in regions),
        even=sum(region.work for region in regions if not region.units),
        regions=sum(region.calls for region in regions),
    )


def losses(regions: Sequence[Region], threads: int) -> list[tuple[str, float, float, float]]:
    """Of each kernel: its share of the work, of the threads' time that it leaves them waiting, and its efficiency."""
    work: dict[str, float] = defaultdict(float)
    span: dict[str, float] = defaultdict(float)
    for region in regions:
        name = region.kernel.removeprefix("stoker_")
        work[name] += region.work
        span[name] += threads * region.makespan
    everything, time_of_all = sum(work.values()), sum(span.values())
    found = [
        (name, work[name] / everything, (span[name] - work[name]) / time_of_all, work[name] / span[name])
        for name in work
        if span[name]
    ]
    return sorted(found, key=lambda one: -one[2])


def too_few(regions: Sequence[Region], threads: int, times: int = 1) -> list[Region]:
    """Regions with at least 1% of the work that could be cut into fewer than `times` pieces per thread."""
    work = sum(region.work for region in regions)
    found = [region for region in regions if 0 < region.fewest < times * threads and region.work >= LARGE * work]
    return sorted(found, key=lambda region: -region.work)


def record(step: Step, number: int, threads: int) -> tuple[list[Region], float]:
    """The regions of one step, and the CPU seconds of its thread."""
    with virtual_threads(threads):
        step(number)  # what is measured, compiled or allocated once: engines, programs, the memory of the optimizer
    gc.collect()
    with virtual_threads(threads) as regions:
        begin = time.thread_time()
        step(number)
        return regions(), time.thread_time() - begin


def torch_operators(step: Step, number: int) -> list[Operator]:
    """torch's own operators in a step on one thread, from its profiler."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with virtual_threads(2), profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
        begin, wall = time.thread_time(), time.perf_counter()
        step(number)
        # The profiler counts time in which other programs ran as well.
        running = min(1.0, (time.thread_time() - begin) / (time.perf_counter() - wall))
    found: dict[tuple[str, int], list[float]] = defaultdict(lambda: [0, 0.0])
    for event in recorded.events():
        if event.name.startswith("aten::"):
            shapes = [shape for shape in event.input_shapes if isinstance(shape, (list, tuple)) and shape]
            sizes = [torch.Size(shape).numel() for shape in shapes if all(isinstance(one, int) for one in shape)]
            entry = found[event.name, max(sizes, default=0)]
            entry[0] += 1
            entry[1] += 1e-6 * running * event.self_cpu_time_total
    return [Operator(name, size, int(calls), seconds) for (name, size), (calls, seconds) in found.items()]


# --- Cases ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    title: str
    build: Callable[[int | None, Path], Step]
    """Takes the number of layers, or None for the model's, and the folder of the data."""


def bert_qa(layers: int | None, data: Path) -> Step:
    import train_step
    from training_step import optimized_step

    case = train_step.CASES["bert-qa"]
    case = dataclasses.replace(case, layers=layers or case.layers)
    return optimized_step(train_step.build_model(case), train_step.loss_of(case, case.pad_to))


def embeddings(layers: int | None, data: Path) -> Step:
    import torch
    from training_step import optimized_step

    import tasks

    torch.manual_seed(0)
    model, loss = tasks.embeddings(data, {} if layers is None else {"num_hidden_layers": layers})
    return optimized_step(model, loss)


def smollm2_lora(layers: int | None, data: Path) -> Step:
    import decoder_step
    from training_step import optimized_step

    case = dataclasses.replace(decoder_step.CASES["smollm2-lora"], layers=layers)
    return optimized_step(decoder_step.build_model(case), decoder_step.loss_of(case, flat=False), lr=1e-5)


CASES = {
    "bert-qa": Case(f"BERT-base, SQuAD, 12 rows, {sum(SQUAD[0]):,} tokens", bert_qa),
    "embeddings": Case("MiniLM embeddings, 64 pairs of SQuAD", embeddings),
    "smollm2-lora": Case(
        f"SmolLM2-135M, LoRA, 8 rows of Alpaca, {sum(n for n, _ in ALPACA[0]):,} tokens", smollm2_lora
    ),
}
"""The first batch of each is trained on again and again, so that all numbers of threads see the same work."""


# --- What is printed -----------------------------------------------------------------------------------------------------------


def steps_table(predictions: Sequence[Prediction]) -> str:
    """One row per number of threads."""
    first = predictions[0]
    lines = [
        f"{'threads':>9}{'step':>11}{'host':>9}{'kernels':>10}{'waking':>9}{'torch':>8}{'efficiency':>12}{'faster':>9}"
    ]
    for one in predictions:
        parts = "".join(
            f"{1e3 * part:{width}.1f}"
            for part, width in ((one.host, 9), (one.kernels, 10), (one.waking, 9), (one.torch, 8))
        )
        bar = f"  bar {BARS[one.threads]:.2f}" if one.threads in BARS else ""
        lines.append(
            f"{one.threads:9}{1e3 * one.step:8.1f} ms{parts}{one.efficiency:12.2f}{first.step / one.step:8.1f}x"
            f"{bar}{' MISSED' if one.missed else ' reached' if bar else ''}"
        )
    return "\n".join(lines)


def losses_table(regions: Sequence[Region], prediction: Prediction, most: int = 8) -> str:
    threads = prediction.threads
    lines = [
        f"  {threads} threads: what kernels lose, as shares of the threads' time; "
        f"{prediction.even / max(prediction.work, 1e-12):.0%} of the work is MKL's and taken as divided evenly",
        f"  {'kernel':34}{'work':>7}{'lost':>8}{'efficiency':>12}",
    ]
    for name, work, lost, efficiency in losses(regions, threads)[:most]:
        lines.append(f"  {name:34}{work:7.1%}{lost:8.1%}{efficiency:12.2f}")
    work = sum(region.work for region in regions)
    few = too_few(regions, threads)
    lines.append(f"  regions with fewer pieces than threads and at least {LARGE:.0%} of the work: {len(few) or 'none'}")
    for region in few:
        where = f"{region.kernel.removeprefix('stoker_')}, {region.place}"
        lines.append(f"    {where:56}{region.fewest:5} pieces{region.work / work:8.1%}")
    return "\n".join(lines)


def run_case(
    title: str, step: Step, threads: Sequence[int], say: Callable[[str], None] = print
) -> tuple[list[Prediction], list[str]]:
    """Predictions by number of threads, and the bars that are missed."""
    say(title)
    step(0)
    operators = torch_operators(step, 0)
    runs = [(count, *record(step, 0, count)) for count in threads]
    predictions = [of_run(regions, operators, seconds, count) for count, regions, seconds in runs]
    # It is the same for every number of threads: what differs is noise.
    host = statistics.median(one.host for one in predictions)
    predictions = [dataclasses.replace(one, host=host) for one in predictions]
    tables = [
        losses_table(regions, prediction)
        for (count, regions, _), prediction in zip(runs, predictions, strict=True)
        if count in BARS or len(threads) == 1
    ]
    say("\n".join((steps_table(predictions), *tables)))
    faults = [
        f"{title}: {one.efficiency:.2f} on {one.threads} threads; bar {BARS[one.threads]:.2f}"
        for one in predictions
        if one.missed
    ]
    return predictions, faults


def validate(
    title: str, step: Step, steps: int, cpu_time: bool = False, say: Callable[[str], None] = print
) -> tuple[float, float]:
    """The predicted and the measured seconds on the threads that torch has here, in turn.

    With `cpu_time` the measured step is the host's time and the CPU time of the threads beyond it, divided by their number.
    """
    import torch

    from stoker.machine.load import others_during

    threads = torch.get_num_threads()
    step(0)
    operators = torch_operators(step, 0)
    predicted: list[Prediction] = []
    measured: list[tuple[float, float]] = []  # seconds, and how many CPUs other programs kept busy
    for _ in range(steps):
        regions, taken = record(step, 0, threads)
        predicted.append(of_run(regions, operators, taken, threads))
        step(0)  # back to real threads
        others, begin, spent = others_during(), time.perf_counter(), time.process_time()
        step(0)
        seconds, spent, load = time.perf_counter() - begin, time.process_time() - spent, others()
        host = predicted[-1].host  # one thread works, the others sleep
        measured.append((host + (spent - host) / threads if cpu_time else seconds, load.busy if load else 0.0))
    ours = statistics.median(one.step for one in predicted)
    host = statistics.median(one.host for one in predicted)
    theirs, busy = min(measured)  # other programs only make a step slower
    off = ours / theirs - 1
    how = " by CPU time" if cpu_time else ""
    state = "within" if abs(off) <= OFF_BY else "NOT within"
    say(
        f"{title}\n  {threads} threads: predicted {1e3 * ours:.0f} ms, measured {1e3 * theirs:.0f} ms{how}: {off:+.1%}, "
        f"{state} {OFF_BY:.0%}; host {1e3 * host:.1f} ms; other programs kept {busy:.1f} CPUs busy"
    )
    return ours, theirs


def for_docs(found: dict[str, Any]) -> str:
    """The table of docs/machines.md, and the efficiencies of src/stoker/hf/core_scaling.py."""
    cases = {case["title"]: [Prediction(**one) for one in case["predictions"]] for case in found["cases"].values()}
    counts = [one.threads for one in next(iter(cases.values()))]
    lines = ["| case | " + " | ".join(map(str, counts)) + " |", "|---|" + "---|" * len(counts)]
    for title, predictions in cases.items():
        lines.append(f"| {title}: efficiency | " + " | ".join(f"{one.efficiency:.2f}" for one in predictions) + " |")
        faster = [predictions[0].step / one.step for one in predictions]
        lines.append(f"| times as fast as on {counts[0]} | " + " | ".join(f"{ratio:.1f}" for ratio in faster) + " |")
    least = [min(predictions[at].efficiency for predictions in cases.values()) for at in range(len(counts))]
    pairs = ", ".join(f"({count}, {share:.2f})" for count, share in zip(counts, least, strict=True))
    return "\n".join([*lines, f"_EFFICIENCY = ((1, 1.0), {pairs})"])


def draw(found: dict[str, Any], path: Path) -> None:
    """Left: how much faster than on two threads; right: where the time of a step on 56 threads goes."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.family": "sans-serif", "svg.hashsalt": "stoker", "svg.fonttype": "none", "font.size": 9})
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), width_ratios=(1, 1.25))
    colours = ("#d9480f", "#f08c00", "#495057")
    cases = {name: [Prediction(**one) for one in case["predictions"]] for name, case in found["cases"].items()}
    titles = {name: case["title"].split(",")[0] for name, case in found["cases"].items()}
    counts = [one.threads for one in next(iter(cases.values()))]
    left.plot(counts, [count / counts[0] for count in counts], color="#adb5bd", ls="--", lw=1, label="perfect")
    for (name, predictions), colour in zip(cases.items(), colours, strict=False):
        faster = [predictions[0].step / one.step for one in predictions]
        left.plot(counts, faster, color=colour, marker="o", ms=3, label=titles[name])
    left.set_xscale("log")
    left.set_yscale("log")
    left.set_xticks(counts, [str(count) for count in counts])
    ticks = [tick for tick in (1, 2, 5, 10, 20, 50) if tick <= counts[-1] / counts[0]]
    left.set_yticks(ticks, [f"{tick}x" for tick in ticks])
    left.minorticks_off()
    left.set_xlabel("cores")
    left.set_title(f"Predicted speed against {counts[0]} cores", loc="left", fontsize=9)
    left.legend(frameon=False, fontsize=8)
    shown = 56 if 56 in counts else counts[-1]
    at = {name: next(one for one in all_ if one.threads == shown) for name, all_ in cases.items()}
    parts = {
        "divided work": [one.kernels - one.imbalance for one in at.values()],
        "imbalance": [one.imbalance for one in at.values()],
        "waking threads": [one.waking for one in at.values()],
        "torch's operators": [one.torch for one in at.values()],
        "host": [one.host for one in at.values()],
    }
    start = [0.0] * len(at)
    names = [titles[name] for name in at]
    for (part, values), colour in zip(
        parts.items(), ("#d9480f", "#ffc078", "#fab005", "#adb5bd", "#495057"), strict=True
    ):
        right.barh(names, [1e3 * value for value in values], left=start, color=colour, label=part, height=0.55)
        start = [begin + 1e3 * value for begin, value in zip(start, values, strict=True)]
    for place, end in enumerate(start):
        right.text(end, place, f" {end:.0f} ms", va="center", fontsize=8)
    right.set_xlim(0, 1.15 * max(start))
    right.invert_yaxis()
    right.set_title(f"A step on {shown} such cores, in milliseconds", loc="left", fontsize=9)
    right.legend(frameon=False, fontsize=8, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.12))
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def _use_one_engine() -> None:
    """Products by oneDNN's microkernels where they are to be had: their tasks are Stoker's, so that none is assumed to be even.

    The trials that otherwise choose an engine run on one core here, and would say nothing about 56.
    """
    import torch

    from stoker.kernels import microkernels

    if microkernels.find(torch.float32):
        os.environ.setdefault("STOKER_LINEAR_ENGINE", "onednn")


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--threads", nargs="+", type=int, default=THREADS)
    parser.add_argument("--layers", type=int, help="instead of all of the model's")
    parser.add_argument("--validate", action="store_true", help="compare with steps measured on this machine's cores")
    parser.add_argument("--cpu-time", action="store_true", help="with --validate, where other programs run")
    parser.add_argument("--steps", type=int, default=3, help="of each side with --validate (default 3)")
    parser.add_argument("--data", type=Path, default=Path(__file__).resolve().parents[2] / "shared" / "data")
    parser.add_argument("--out", type=Path, help="folder for many_cores.json and many_cores.svg; keeps its other cases")
    parser.add_argument("--draw", action="store_true", help="only draw the plot of --out again")
    options = parser.parse_args(words)
    file = options.out / "many_cores.json" if options.out else None
    found = json.loads(file.read_text()) if file and file.exists() else {"cases": {}}
    if options.draw:
        draw(found, options.out / "many_cores.svg")
        print(for_docs(found))
        return 0
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # tokenizing belongs to the thread whose clock is read
    _use_one_engine()
    print(cpu_name(), flush=True)
    faults: list[str] = []
    for name in options.case:
        depth = f", {options.layers} layers" if options.layers else ""
        title = CASES[name].title + depth
        step = CASES[name].build(options.layers, options.data)
        if options.validate:
            ours, theirs = validate(title, step, options.steps, options.cpu_time)
            found.setdefault("validated", {})[name] = {"predicted": ours, "measured": theirs}
            faults += [f"{title}: the prediction is off by more"] if abs(ours / theirs - 1) > OFF_BY else []
        else:
            predictions, missed = run_case(title, step, options.threads)
            found["cases"][name] = {"title": title, "predictions": [asdict(one) for one in predictions]}
            faults += missed
        del step
        gc.collect()
        if file:
            file.write_text(json.dumps({**found, "cpu": cpu_name()}, indent=1) + "\n")
    if file and found["cases"]:
        draw(found, options.out / "many_cores.svg")
    print("\n".join(faults))
    return int(bool(faults))


if __name__ == "__main__":
    raise SystemExit(main())
