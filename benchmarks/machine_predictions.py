"""The predictions of docs/machines.md: what `stoker plan --cores` says of machines that we do not have, as Markdown.

    python benchmarks/machine_predictions.py                 a few seconds; nothing is measured
    python benchmarks/machine_predictions.py --collectives   measures an allreduce between two processes here first

Rates of the machines are published ones, or follow from published ones; each is named below. The software's rate between nodes is
that of an allreduce between two processes on two cores of an AMD EPYC (Zen 5), over the loopback interface.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from stoker.english import duration
from stoker.plan.advice import Job, epoch, plan
from stoker.plan.cost_model import Collectives, Network, Node
from stoker.plan.link_rates import measure_collectives
from stoker.plan.predicted_node import MachineRates, predict_node
from stoker.plan.subject import Subject


@dataclass(frozen=True)
class Machine:
    title: str
    cores: int
    gflops: float
    bf16_gflops: float
    bandwidth: float
    """GB/s."""
    why: str
    nodes: int = 1
    network: str = "10gbit"

    def rates(self, bf16: bool) -> MachineRates:
        return MachineRates(
            self.cores, 1e9 * self.gflops, 1e9 * self.bandwidth, 1e9 * self.bf16_gflops if bf16 else None
        )


@dataclass(frozen=True)
class Training:
    title: str
    subject: Subject
    batch: int
    """Rows per node and step."""
    rows: int
    """Of an epoch."""


_RAPIDS = (
    "fp32: 64 operations per cycle, base clock 2.0 GHz (Xeon Platinum 8480+), 80% of it; bf16: 21 TFLOP/s per 56 cores with AMX, "
    "as [KTransformers](https://github.com/kvcache-ai/ktransformers/blob/main/doc/en/AMX.md) publishes of its kernels; "
    "memory: 80% of eight channels of DDR5-4800 per socket"
)
MACHINES = (
    Machine(
        "16 cores of an EPYC 9654", 16, 1450, 2900, 120,
        "fp32: 32 operations per cycle, all-core boost 3.55 GHz, 80% of it; bf16: twice that; memory: what two chiplets can read",
    ),
    Machine("32 cores of Sapphire Rapids", 32, 3280, 12000, 245, _RAPIDS),
    Machine("2 x 56 cores of Sapphire Rapids", 112, 11500, 42000, 490, _RAPIDS),
    Machine("four such nodes, 100 Gbit/s", 112, 11500, 42000, 490, _RAPIDS, 4, "100gbit"),
)  # fmt: skip
TRAININGS = (
    Training("BERT-base, SQuAD, batch 12", Subject("bert-base", "qa", 170), 12, 88_524),
    Training("DistilBERT, SQuAD, batch 32", Subject("distilbert", "qa", 170), 32, 88_524),
    Training("MiniLM, 64 pairs of texts", Subject("minilm", "classify", 82), 128, 200_000),
    Training("SmolLM2-135M, LoRA, batch 8", Subject("smollm2-135m", "sft", 201, 16, 0.76), 8, 10_000),
)
"""A pair of MiniLM is two rows of 82 tokens on average: a question and its context. Rows of SmolLM2 are as long as Alpaca's."""
COLLECTIVES = Collectives(rate=1.0e9, rate_bf16=1.0e9, cpu=0.6e-9, cpu_bf16=0.8e-9, apply=0.3e-9, cast=0.1e-9)
FOUR_OF_THE_PUBLISHED = Machine("4 x 32 cores of Sapphire Rapids", 32, 3280, 12000, 245, _RAPIDS, 4, "25gbit")


def node_of(training: Training, machine: Machine, collectives: Collectives, bf16: bool) -> Node:
    return predict_node(training.subject, training.batch, machine.rates(bf16), collectives)


def prediction(training: Training, machine: Machine, collectives: Collectives, bf16: bool) -> tuple[Node, float, str]:
    """One node, the seconds of its step or of that of all nodes, and the flags that several nodes need."""
    node = node_of(training, machine, collectives, bf16)
    if machine.nodes == 1:
        return node, node.step, ""
    job = Job(training.rows, training.batch)
    advised = plan(node, Network.parse(machine.network), [machine.nodes], job)[0].advised
    return node, advised.step, advised.setup.flags


def cell(training: Training, machine: Machine, collectives: Collectives, bf16: bool) -> str:
    _, step, flags = prediction(training, machine, collectives, bf16)
    job = Job(training.rows, training.batch)
    return f"{1e3 * step:.0f} ms, {duration(epoch(step, job, machine.nodes))}" + (f" (`{flags}`)" if flags else "")


def table(collectives: Collectives) -> str:
    lines = ["| machine | precision | " + " | ".join(one.title for one in TRAININGS) + " |"]
    lines.append("|---|---|" + "---|" * len(TRAININGS))
    for machine in MACHINES:
        for how, bf16 in (("fp32", False), ("bf16", True)):
            cells = [cell(training, machine, collectives, bf16) for training in TRAININGS]
            lines.append(f"| {machine.title if not bf16 else ''} | {how} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def inputs() -> str:
    lines = ["| machine | fp32, GFLOP/s | bf16, GFLOP/s | memory, GB/s | from |", "|---|---|---|---|---|"]
    lines += [
        f"| {one.title} | {one.gflops:,.0f} | {one.bf16_gflops:,.0f} | {one.bandwidth:.0f} | {one.why} |"
        for one in MACHINES
        if one.nodes == 1
    ]
    return "\n".join(lines)


def published(collectives: Collectives) -> str:
    """DistilBERT as Hugging Face's article trains it, and BERT-large as MLPerf does."""
    distilbert, rapids, two_sockets = TRAININGS[1], MACHINES[1], MACHINES[2]
    job = Job(distilbert.rows, distilbert.batch)
    lines = []
    for machine in (rapids, FOUR_OF_THE_PUBLISHED):
        _, step, flags = prediction(distilbert, machine, collectives, bf16=True)
        lines.append(f"DistilBERT, bf16, {machine.title}: {duration(epoch(step, job, machine.nodes))} {flags}")
        if machine.nodes > 1:
            node = node_of(distilbert, machine, collectives, bf16=True)
            plain = plan(node, Network.parse(machine.network), [machine.nodes], job)[0].plain
            lines.append(f"  with plain DDP: {duration(epoch(plain.step, job, machine.nodes))}")
    for length in (512, 256):
        subject = Subject("bert-large", "classify", length)
        node = predict_node(subject, 64, two_sockets.rates(True), collectives)
        lines.append(f"BERT-large, bf16, {two_sockets.title}, rows of {length}: {64 / node.step:.0f} sequences/s")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--collectives", action="store_true", help="measure the rate between processes here")
    options = parser.parse_args()
    collectives = measure_collectives() if options.collectives else COLLECTIVES
    print(f"between nodes: {collectives}\n\n{table(collectives)}\n\n{inputs()}\n\n{published(collectives)}")


if __name__ == "__main__":
    main()
