"""How long a step takes on several nodes: one formula and its assumptions. `link_rates` measures its inputs.

A node's step is measured, everything that happens within the node included, or predicted (`predicted_node`). Between nodes
the gradients (G bytes) are reduced in a ring: each sends and receives t = 2 (n-1)/n G bytes, at the network's rate or at the
rate the software reaches when the network is not the limit, whichever is slower; that is `carry`. Part of it is work for the
node's cores (`busy`, measured as CPU time per byte, with bf16 also that of the rounding) and always adds to the step: it makes
the backward pass longer. How much of the rest overlaps with that pass follows from when gradients are complete (`Node.ready`,
measured). They are exchanged in buckets, as DDP fills them, each as soon as it is full and the one before has been exchanged.

    end_of(bucket) = max(full(bucket), end_of(the bucket before)) + share(bucket) * carry
    step = node + busy + max(end_of(the last bucket) - end of the backward pass, 0)
    with local SGD every K steps: step = node + (carry + apply) / K

It assumes equal nodes, a switched network at full rate, and balanced batches, so that no node waits for a slower one.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from stoker.errors import UserError

__all__ = [
    "BACKWARD",
    "COMPRESSIONS",
    "NO_COLLECTIVES",
    "PARTS",
    "Collectives",
    "Network",
    "Node",
    "Prediction",
    "Setup",
    "predict",
]

BACKWARD = 0.6
"""The backward pass's share of a step where it was not measured: twice the forward pass, with a tenth for the optimizer."""
PARTS = 40
"""The number of equal parts of the backward pass for which `Node.ready` says what is complete."""
_FIRST_BUCKET = 1 << 20
"""Bytes; DDP's first bucket is small, so that the exchange begins early."""
_TCP = 0.94
"""The share of the rate that Ethernet, IP and TCP headers leave, with frames of 1,500 bytes."""
_LATENCIES = ((1.1, 100e-6), (10.1, 50e-6), (1000.0, 20e-6))
"""Typical seconds per message in one rack, by Gbit/s."""
_UNITS = {"mbit": 1e-3, "gbit": 1.0, "tbit": 1e3}

COMPRESSIONS = ("none", "bf16")
"""Those that the formula supports. PowerSGD is not among them: its traffic depends on the shapes of the model."""


@dataclass(frozen=True)
class Network:
    """The network between the nodes."""

    gbit: float
    latency: float

    @classmethod
    def parse(cls, text: str, latency: float | None = None) -> Network:
        """`10gbit`, `2.5gbit`, `500mbit`."""
        match = re.fullmatch(r"\s*([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*(mbit|gbit|tbit)(?:/s)?\s*", text.lower())
        gbit = float(match[1]) * _UNITS[match[2]] if match else 0.0
        if gbit <= 0:
            raise UserError(f"--network {text!r} is not a rate; write it as 10gbit or 500mbit")
        usual = next(seconds for most, seconds in _LATENCIES if gbit <= most or most == _LATENCIES[-1][0])
        return cls(gbit, usual if latency is None else latency)

    @property
    def bytes_per_second(self) -> float:
        return _TCP * self.gbit * 1e9 / 8


@dataclass(frozen=True)
class Collectives:
    """The speed of the communication software on this machine when the network is not the limit."""

    rate: float
    """Bytes per second of an fp32 allreduce between two processes."""
    rate_bf16: float
    cpu: float
    """Seconds of one core per byte of it."""
    cpu_bf16: float
    apply: float
    """Seconds of one core per byte of weights to compute and apply an average of local SGD."""
    cast: float = 0.0
    """Seconds of one core per byte of fp32 gradients to round them to bf16 and to widen the sum again."""

    def summary(self) -> str:
        return (
            f"fp32 {self.rate / 1e9:.2f} GB/s for {1e9 * self.cpu:.2f} core seconds per GB, "
            f"bf16 {self.rate_bf16 / 1e9:.2f} GB/s for {1e9 * self.cpu_bf16:.2f}"
        )


NO_COLLECTIVES = Collectives(math.inf, math.inf, 0.0, 0.0, 0.0)
"""For a single node."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """One machine that trains on its share of the batch."""

    step: float
    """Seconds, including communication between its own processes."""
    processes: int
    parameters: int
    """That are trained, whose gradients the nodes exchange; with LoRA, those of the adapters."""
    collectives: Collectives
    cores: float = 1
    """A fraction for a part of a core."""
    backward: float = BACKWARD
    """The backward pass's share of the step."""
    ready: tuple[float, ...] = ()
    """The share of the gradients that is complete after each of PARTS equal parts of the backward pass; empty if not measured."""
    last: float = 0.2
    """Without `ready`: the share of the gradients that is complete only at the end of the backward pass. The others are assumed
    to become complete evenly. BERT's word embeddings are a fifth."""
    tokens: float = 0.0
    """Per step; 0 if it is not known."""
    memory: float = 0.0
    """Bytes that its processes need together; 0 if it is not known."""
    host: float = 0.0
    """The seconds of the step that more cores would not shorten; 0 if it is not known."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How the nodes exchange gradients."""

    compression: str = "none"
    local_sgd: int = 0
    bucket_mb: int = 100

    @property
    def flags(self) -> str:
        found = [f"--gradient_compression {self.compression}"] if self.compression != "none" else []
        found += [f"--local_sgd {self.local_sgd}"] if self.local_sgd else []
        return " ".join(found)

    @property
    def label(self) -> str:
        return self.flags or "plain DDP"


@dataclass(frozen=True)
class Prediction:
    nodes: int
    setup: Setup
    step: float
    """Seconds."""
    efficiency: float
    """Throughput relative to as many nodes without communication."""


def predict(node: Node, network: Network, nodes: int, setup: Setup) -> Prediction:
    """The step of `nodes` nodes, each with as many rows as the measured one."""
    if nodes < 1:
        raise UserError(f"the number of nodes is {nodes}; it must be 1 or more")
    if nodes == 1:
        return Prediction(1, setup, node.step, 1.0)
    small = setup.compression == "bf16"
    gradients = (2 if small else 4) * node.parameters
    traffic = 2 * (nodes - 1) / nodes * gradients
    messages = max(4 * node.parameters / (setup.bucket_mb * 1e6), 1.0)
    wire = traffic / network.bytes_per_second + 2 * (nodes - 1) * network.latency * messages
    rate, cpu = (
        (node.collectives.rate_bf16, node.collectives.cpu_bf16)
        if small
        else (node.collectives.rate, node.collectives.cpu)
    )
    # One thread of the node's leader communicates; the CPU time it takes is spread over all cores.
    busy = min(traffic * cpu / node.cores, max(wire, traffic / rate)) if node.cores >= 1 else traffic * cpu / node.cores
    carry = max(wire, traffic / rate, busy)
    if small and not setup.local_sgd:  # each process rounds its own gradients
        busy += 4 * node.parameters * node.collectives.cast / node.cores * node.processes
    if setup.local_sgd:
        apply = 4 * node.parameters * node.collectives.apply / node.cores * node.processes
        step = node.step + (carry + apply) / setup.local_sgd
    else:
        backward = node.backward * node.step + busy
        end = 0.0
        for full, share in _buckets(node, setup.bucket_mb * 1e6):
            end = max(full * backward, end) + share * carry
        step = node.step + busy + max(end - backward, 0.0)
    return Prediction(nodes, setup, step, node.step / step)


def _buckets(node: Node, limit: float) -> list[tuple[float, float]]:
    """When each of DDP's buckets is full, as a share of the backward pass, and its share of the gradients."""
    ready = node.ready or (*((part + 1) / PARTS * (1 - node.last) for part in range(PARTS - 1)), 1.0)
    size = 4 * node.parameters
    found: list[tuple[float, float]] = []
    sent = 0.0
    for part, complete in enumerate(ready):
        least = (_FIRST_BUCKET if not found else limit) / size
        if complete - sent >= least or (part == len(ready) - 1 and complete > sent):
            found.append(((part + 1) / len(ready), complete - sent))
            sent = complete
    return found
