"""How long training takes on one machine: the arithmetic and the memory traffic of a step over the machine's measured rates.

    seconds = (layers / 0.92 + head / 0.7 + adapters / 0.3 + attention / 0.54) / (rate * efficiency) + bytes / bandwidth + host

`stoker train sft` estimates its time with it before it starts, and `stoker plan` predicts machines that are not there to be
measured. How well work divides among cores and what no core divides are in `stoker.hf.core_scaling`; time that a network takes
is left to `stoker.plan.cost_model`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from stoker.hf.core_scaling import efficiency, host_seconds
from stoker.hf.meter import Work, causal_head, linear_layers, peak, products
from stoker.machine.rates import Rates

__all__ = ["Rows", "Speed", "StepCost"]

# Measured on two cores of an AMD EPYC (AVX2); `python benchmarks/step_cost.py` compares measured steps with predicted ones.
_LAYERS, _HEAD, _ADAPTERS, _ATTENTION = 0.92, 0.7, 0.3, 0.54
"""Shares of the measured rate that the parts of a step reach: products of linear layers, of a language model's head with the
loss, of adapters, whose rank is small, and attention."""
_PASSES = 6
"""How often the inputs and outputs of a linear layer are read or written outside its products: norms, activations, residuals,
forward and backward."""
_FROZEN, _TRAINED, _UPDATED = 24, 32, 28
"""Bytes moved per parameter: a weight is read, packed and read again, forward and backward; the gradient of a trained one is
written and read; an update reads weight, gradient and two moments, and writes three of them."""


@dataclass(frozen=True)
class Rows:
    """Sizes of what is trained on, for one batch or for many together."""

    tokens: float
    pairs: float
    """Of tokens of the same row, including those that a causal model does not compute."""
    labelled: float = 0.0
    batches: float = 1.0
    updates: float = 1.0
    """Of the weights: fewer than batches where gradients are accumulated."""

    @classmethod
    def of(cls, lengths: Any, labelled: float = 0.0) -> Rows:
        """One batch with rows of these lengths; `labelled` is the share of tokens with a label."""
        sizes = np.asarray(lengths, np.float64)
        return cls(float(sizes.sum()), float(np.square(sizes).sum()), labelled * float(sizes.sum()))


@dataclass(frozen=True)
class Speed:
    """What a process can compute and move per second, with all cores that it has."""

    flops: float
    """Of a large product, which divides evenly."""
    bytes: float
    cores: float = 1
    fp32: float | None = None
    """`flops` in fp32 where that is the rate in bf16: attention computes in fp32 whatever it stores."""

    @classmethod
    def of(cls, rates: Rates, *, bf16: bool = False) -> Speed:
        """This process on this machine: as many of its cores as torch has threads."""
        cores = torch.get_num_threads()
        bandwidth = 1e9 * rates.bandwidth_all * min(1.0, cores / rates.threads)
        return cls(peak(rates, bf16), bandwidth, cores, peak(rates, False) if bf16 else None)


@dataclass(frozen=True)
class StepCost:
    """What training a model takes, apart from its rows."""

    work: Work
    weights: float
    """Of linear layers, without the head."""
    head: float
    adapters: float
    """The part of `work.per_token` that is for adapters."""
    moved_per_token: float
    """Bytes of activations."""
    moved_per_batch: float
    """Bytes of weights and gradients."""
    moved_per_update: float
    """Bytes of weights, gradients and optimizer states."""
    trained: int
    """Parameters with gradients, which processes exchange."""
    calls: int
    """Linear layers, adapters included."""

    @classmethod
    def of(cls, model: nn.Module) -> StepCost:
        head = causal_head(model)
        layers = [(name, one) for name, one in linear_layers(model) if one is not head]
        # Adapters read what the layer that they belong to reads.
        adapters = [one for name, one in layers if ".lora_" in name]
        values = sum(sum(one.weight.shape) for name, one in layers if ".lora_" not in name)
        parameters = list(model.parameters())
        trained = sum(one.numel() for one in parameters if one.requires_grad)
        frozen = sum(one.numel() for one in parameters) - trained
        return cls(
            work=Work.of(model),
            weights=float(sum(one.weight.numel() for _, one in layers)),
            head=0.0 if head is None else float(head.weight.numel()),
            adapters=sum(map(products, adapters)),
            moved_per_token=4.0 * _PASSES * values,
            moved_per_batch=float(_FROZEN * frozen + _TRAINED * trained),
            moved_per_update=float(_UPDATED * trained),
            trained=trained,
            calls=len(layers),
        )

    def with_forward(self, count: float = 1.0) -> StepCost:
        """The cost with more forward passes, as for activations that are computed again or a reference model."""
        work = dataclasses.replace(
            self.work,
            per_token=self.work.per_token + 2.0 * count * self.weights,
            # the backward pass of attention takes twice as much as the forward
            per_pair=self.work.per_pair * (1.0 + count / 3.0),
            per_label=self.work.per_label + 2.0 * count * self.head,
        )
        return dataclasses.replace(self, work=work)

    def seconds(self, rows: Rows, speed: Speed) -> float:
        work = self.work
        products = (
            (work.per_token - self.adapters) * rows.tokens / _LAYERS
            + self.adapters * rows.tokens / _ADAPTERS
            + work.per_label * rows.labelled / _HEAD
        )
        attention = work.per_pair * rows.pairs / _ATTENTION
        moved = (
            self.moved_per_token * rows.tokens
            + self.moved_per_batch * rows.batches
            + self.moved_per_update * rows.updates
        )
        busy = efficiency(speed.cores, rows.tokens / max(rows.batches, 1.0))
        computed = (products / speed.flops + attention / (speed.fp32 or speed.flops)) / busy
        return computed + moved / speed.bytes + self.host(speed.cores) * rows.batches

    def host(self, cores: float) -> float:
        """Seconds of a batch that more cores do not shorten."""
        return host_seconds(self.calls, cores)
