"""From predictions to advice: which settings suit how many nodes, with the time and cost of an epoch, as a table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from stoker.english import duration
from stoker.plan.cost_model import Network, Node, Prediction, Setup, predict

__all__ = ["Job", "Row", "accumulation", "cost", "epoch", "machines_table", "plan", "table"]

_LONGEST_LOCAL = 64  # steps between averages; the effect of more on quality has not been measured
_GOOD, _PLAIN = 0.9, 0.95


@dataclass(frozen=True)
class Job:
    """The size of an epoch and the price of a node."""

    rows: int
    """Per epoch."""
    batch: int
    """Rows per node and step."""
    price: float | None = None
    """Per node and hour."""


@dataclass(frozen=True)
class Row:
    """Predictions for one number of nodes: plain, with bf16 compression, with local SGD, and the advised one."""

    plain: Prediction
    bf16: Prediction
    local: Prediction
    advised: Prediction
    epoch: float
    """Seconds per epoch as advised."""
    cost: float | None


def plan(node: Node, network: Network, counts: Sequence[int], job: Job) -> list[Row]:
    return [_row(node, network, count, job) for count in counts]


def _row(node: Node, network: Network, count: int, job: Job) -> Row:
    bucket = _bucket(node, network, count)
    plain = predict(node, network, count, Setup(bucket_mb=bucket))
    bf16 = predict(node, network, count, Setup(compression="bf16", bucket_mb=bucket))
    local = _local(node, network, count)
    # Prefer what changes the mathematics least: exact gradients, then rounded ones, then occasional averages.
    advised = max((plain, bf16, local), key=lambda one: one.efficiency)
    if plain.efficiency >= min(_PLAIN, advised.efficiency):
        advised = plain
    elif bf16.efficiency >= min(_GOOD, advised.efficiency):
        advised = bf16
    return Row(plain, bf16, local, advised, epoch(advised.step, job, count), cost(advised.step, job, count))


def accumulation(node: Node, row: Row) -> tuple[int, Prediction] | None:
    """The fewest accumulated batches with which DDP keeps the nodes busy, without averages of weights, and that prediction.

    The gradients are exchanged in the last of them only. None if even many do not suffice.
    """
    for count in (2, 4, 8, 16, 32):
        for one in (row.plain, row.bf16):
            step = (node.step * (count - 1) + one.step) / count
            if node.step / step >= _GOOD:
                return count, Prediction(one.nodes, one.setup, step, node.step / step)
    return None


def epoch(step: float, job: Job, nodes: int) -> float:
    """Seconds per epoch; its last step may have fewer rows."""
    return math.ceil(job.rows / (job.batch * nodes)) * step


def cost(step: float, job: Job, nodes: int) -> float | None:
    return None if job.price is None else nodes * epoch(step, job, nodes) / 3600 * job.price


def _local(node: Node, network: Network, count: int) -> Prediction:
    """The smallest number of local steps that keeps the nodes busy; the largest if none does."""
    every = 4
    while True:
        found = predict(node, network, count, Setup(local_sgd=every, compression="bf16" if every > 16 else "none"))
        if found.efficiency >= _GOOD or every >= _LONGEST_LOCAL:
            return found
        every *= 2


def _bucket(node: Node, network: Network, count: int) -> int:
    """The better of two bucket sizes: large ones need fewer messages, small ones start earlier and leave less for the end."""
    both = {size: predict(node, network, count, Setup(bucket_mb=size)).step for size in (100, 25)}
    return min(both, key=lambda size: both[size])


def table(rows: Sequence[Row], price: bool) -> str:
    head = ["nodes", "DDP fp32", "", "DDP bf16", "", "local SGD", "", "epoch", *(["cost"] if price else []), "advice"]
    lines = [head]
    for row in rows:
        cells = [str(row.plain.nodes)]
        for one in (row.plain, row.bf16, row.local):
            every = f" K={one.setup.local_sgd}" if one.setup.local_sgd and one.nodes > 1 else ""
            cells += [f"{one.step:.2f} s{every}", f"{one.efficiency:.0%}"]
        cells += [duration(row.epoch), *([f"{row.cost:.2f}"] if row.cost is not None else [])]
        cells.append(row.advised.setup.label if row.advised.nodes > 1 else "")
        lines.append(cells)
    return _aligned(lines)


def machines_table(nodes: Sequence[Node], job: Job) -> str:
    """Single machines with different numbers of cores."""
    lines = [
        [
            "cores",
            "processes",
            "step",
            "host",
            "tokens/s",
            "memory",
            "epoch",
            *(["cost"] if job.price is not None else []),
        ]
    ]
    for node in nodes:
        cells = [str(node.cores), str(node.processes), f"{node.step:.3f} s", f"{node.host / node.step:.0%}"]
        cells += [f"{node.tokens / node.step:,.0f}"]
        cells += [f"{node.memory / 1e9:.1f} GB", duration(epoch(node.step, job, 1))]
        price = cost(node.step, job, 1)
        lines.append([*cells, *([f"{price:.2f}"] if price is not None else [])])
    return _aligned(lines)


def _aligned(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)
