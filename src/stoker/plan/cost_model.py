"""How long a step takes on several nodes: one formula and its assumptions. `link_rates` measures its inputs.

A node's step is measured, everything that happens within the node included, or predicted (`predicted_node`). Between nodes
the gradients (G bytes) are reduced in a ring: each sends and receives t = 2 (n-1)/n G bytes, at the network's rate or at the
rate the software reaches when the network is not the limit, whichever is slower; that is `carry`. Part of it is work for the
node's cores (`busy`, measured as CPU time per byte) and always adds to the step. The rest is waiting, which overlaps with the
backward pass, except for what is ready last: the last bucket and the embeddings, whose gradients are complete only at its end.

    step = node + busy + max(last * (carry - busy), carry - busy - backward)
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
    "Collectives",
    "Network",
    "Node",
    "Prediction",
    "Setup",
    "predict",
]

BACKWARD = 0.6
"""The backward pass's share of a step: twice the forward pass, with a tenth for the optimizer."""
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
    cores: int = 1
    last: float = 0.2
    """Share of the gradients that is ready only when the backward pass ends: BERT's word embeddings are a fifth."""
    tokens: float = 0.0
    """Per step; 0 if it is not known."""
    memory: float = 0.0
    """Bytes that its processes need together; 0 if it is not known."""


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
    carry = max(wire, traffic / rate)
    # One thread of the node's leader communicates; the CPU time it takes is spread over all cores.
    busy = min(traffic * cpu / node.cores, carry)
    if setup.local_sgd:
        apply = 4 * node.parameters * node.collectives.apply / node.cores * node.processes
        step = node.step + (carry + apply) / setup.local_sgd
    else:
        last = max(node.last, min(setup.bucket_mb * 1e6 / (4 * node.parameters), 1.0))
        idle = carry - busy
        step = node.step + busy + max(last * idle, idle - BACKWARD * node.step)
    return Prediction(nodes, setup, step, node.step / step)
