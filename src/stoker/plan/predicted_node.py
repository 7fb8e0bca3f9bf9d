"""The step of a machine that is not there to be measured: the cost of a step (`stoker.hf.step_cost`) at rates per core.

The rates are those of this machine or given ones. It assumes that products scale with the number of cores, which takes batches
with enough tokens for all of them, and that other cores have the same clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from stoker.errors import UserError
from stoker.machine.rates import Rates
from stoker.plan.cost_model import Collectives, Node
from stoker.plan.subject import Subject, ready_last

__all__ = ["EXCHANGED", "MachineRates", "predict_node"]

_SOCKET = 200e9
"""Bytes per second: about what a server's memory gives, with eight channels. Cores of a larger machine share it."""
_CORES_PER_PROCESS = 16
EXCHANGED = 12
"""Bytes that each process moves per gradient to sum those of one machine in shared memory: write, read, read the sum."""


@dataclass(frozen=True)
class MachineRates:
    cores: int
    flops: float
    bytes: float

    @classmethod
    def of(cls, rates: Rates, cores: int, gflops: float | None = None, bandwidth: float | None = None) -> MachineRates:
        """Those of a machine like this one with another number of cores; `gflops` and `bandwidth` (GB/s) are known rates."""
        scale = cores / rates.threads
        here = 1e9 * rates.bandwidth_all
        return cls(
            cores,
            1e9 * rates.fp32_all * scale if gflops is None else 1e9 * gflops,
            min(here * scale, max(here, _SOCKET)) if bandwidth is None else 1e9 * bandwidth,
        )

    def summary(self) -> str:
        return f"{self.flops / 1e9:,.0f} GFLOP/s in fp32, {self.bytes / 1e9:,.0f} GB/s of memory"


def predict_node(
    subject: Subject, batch: int, machine: MachineRates, collectives: Collectives, processes: int | None = None
) -> Node:
    """A machine with these rates that trains on `batch` rows per step."""
    from stoker.hf.step_cost import Rows, Speed, StepCost

    processes = processes or min(max(machine.cores // _CORES_PER_PROCESS, 1), batch)
    if processes > min(machine.cores, batch):
        raise UserError(
            f"stoker plan: --processes is {processes}; it must be at most the number of cores ({machine.cores}) and of rows per "
            f"step (--batch {batch})"
        )
    model = subject.build("meta")
    lengths = subject.lengths(batch, model.config)
    cost = StepCost.of(model)
    labelled = subject.labelled if subject.task == "sft" else 0.0
    rows = Rows.of(lengths, labelled)
    # Each process has its share of rows, cores and memory.
    share = Rows(rows.tokens / processes, rows.pairs / processes, rows.labelled / processes)
    step = cost.seconds(share, Speed(machine.flops / processes, machine.bytes / processes))
    if processes > 1:
        step += EXCHANGED * cost.trained * processes / machine.bytes
    return Node(
        step=step, processes=processes, parameters=cost.trained, collectives=collectives, cores=machine.cores,
        last=ready_last(model), tokens=float(lengths.sum()),
        memory=sum(subject.memory(model, lengths[rank::processes]) for rank in range(processes)),
    )  # fmt: skip
