"""The step of a machine that is not there to be measured: the cost of a step (`stoker.hf.step_cost`) at rates per core.

The rates are those of this machine or given ones. How much of them a process with several cores gets, and the time that no core
shortens, come from `stoker.hf.core_scaling`. It assumes cores with the same clock and memory equally far from all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stoker.errors import UserError
from stoker.machine.rates import Rates
from stoker.plan.cost_model import Collectives, Node
from stoker.plan.subject import Subject, ready_last

if TYPE_CHECKING:
    from stoker.hf.step_cost import Speed

__all__ = ["EXCHANGED", "MachineRates", "predict_node"]

_SOCKET = 200e9
"""Bytes per second: about what a server's memory gives, with eight channels. Cores of a larger machine share it."""
_MOST_CORES = 64
"""Of a process: it should not span two sockets, whose distance the prediction leaves out."""
_WORTHWHILE = 1.05
"""Each process needs memory for weights and optimizer: more of them are used where that makes a step so much faster."""
EXCHANGED = 12
"""Bytes that each process moves per gradient to sum those of one machine in shared memory: write, read, read the sum."""


@dataclass(frozen=True)
class MachineRates:
    cores: int
    flops: float
    """In fp32."""
    bytes: float
    bf16: float | None = None
    """If training in bf16 is predicted."""

    @classmethod
    def of(
        cls,
        rates: Rates,
        cores: int,
        gflops: float | None = None,
        bandwidth: float | None = None,
        bf16_gflops: float | None = None,
    ) -> MachineRates:
        """Those of a machine like this one with another number of cores; the others are known rates, `bandwidth` in GB/s."""
        scale = cores / rates.threads
        here = 1e9 * rates.bandwidth_all
        return cls(
            cores,
            1e9 * rates.fp32_all * scale if gflops is None else 1e9 * gflops,
            min(here * scale, max(here, _SOCKET)) if bandwidth is None else 1e9 * bandwidth,
            None if bf16_gflops is None else 1e9 * bf16_gflops,
        )

    def summary(self) -> str:
        bf16 = f", {self.bf16 / 1e9:,.0f} in bf16" if self.bf16 else ""
        return f"{self.flops / 1e9:,.0f} GFLOP/s in fp32{bf16}, {self.bytes / 1e9:,.0f} GB/s of memory"

    def speed(self, processes: int) -> Speed:
        """Of each of these processes."""
        from stoker.hf.step_cost import Speed

        return Speed(
            flops=(self.bf16 or self.flops) / processes,
            bytes=self.bytes / processes,
            cores=self.cores / processes,
            fp32=self.flops / processes if self.bf16 else None,
        )


def predict_node(
    subject: Subject, batch: int, machine: MachineRates, collectives: Collectives, processes: int | None = None
) -> Node:
    """A machine with these rates that trains on `batch` rows per step; by default with the best number of processes."""
    most = min(machine.cores, batch)
    if processes and processes > most:
        raise UserError(
            f"stoker plan: --processes is {processes}; it must be at most the number of cores ({machine.cores}) and of rows per "
            f"step (--batch {batch})"
        )
    model = subject.build("meta")
    counts = [processes] if processes else _candidates(machine.cores, most)
    nodes = [_node(subject, model, batch, machine, collectives, count) for count in counts]
    best = min(one.step for one in nodes)
    return next(one for one in nodes if one.step <= _WORTHWHILE * best)


def _candidates(cores: int, most: int) -> list[int]:
    """Numbers of processes worth trying, with equally many cores for each."""
    found = [count for count in (1, 2, 4, 8, 16) if count <= most and cores % count == 0]
    return [count for count in found if cores // count <= _MOST_CORES] or found[-1:]


def _node(
    subject: Subject, model: Any, batch: int, machine: MachineRates, collectives: Collectives, processes: int
) -> Node:
    from stoker.hf.step_cost import Rows, StepCost

    lengths = subject.lengths(batch, model.config)
    cost = StepCost.of(model)
    labelled = subject.labelled if subject.task == "sft" else 0.0
    rows = Rows.of(lengths, labelled)
    # Each process has its share of rows, cores and memory, and all of the host's work.
    share = Rows(rows.tokens / processes, rows.pairs / processes, rows.labelled / processes)
    speed = machine.speed(processes)
    step = cost.seconds(share, speed)
    if processes > 1:
        step += EXCHANGED * cost.trained * processes / machine.bytes
    return Node(
        step=step, processes=processes, parameters=cost.trained, collectives=collectives, cores=machine.cores,
        last=ready_last(model), tokens=float(lengths.sum()), host=cost.host(speed.cores),
        memory=sum(subject.memory(model, lengths[rank::processes]) for rank in range(processes)),
    )  # fmt: skip
