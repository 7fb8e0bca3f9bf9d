"""Run by every rank on the fake hosts: the most important collectives of c10d, within and between hosts."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist

from comm import cases
from stoker.comm.registration import register

register()
torch.set_num_threads(1)
dist.init_process_group("ccl")
rank, size = dist.get_rank(), dist.get_world_size()
cases.allreduce(rank, size, "SUM", "float32")
cases.allreduce(rank, size, "AVG", "bfloat16")
cases.allreduce(rank, size, "MAX", "int64")
cases.allreduce_is_the_same_on_all_ranks(rank, size)
x = torch.full((5_000_000,), float(rank))  # several pieces between hosts
dist.all_reduce(x)
assert x.unique().tolist() == [float(sum(range(size)))]
for case in (
    ("barrier",)
    if "briefly" in sys.argv
    else (
        "allreduce_bool",
        "async_order_is_free_between_groups",
        "reduce_scatter",
        "averages_between_hosts",
        "allgather_uneven",
        "alltoall",
        "alltoall_single",
        "reduce",
        "gather",
        "scatter",
        "sub_groups",
        "send_and_receive",
        "exchange_in_a_ring",
        "data_parallel",
        "objects",
        "barrier",
    )
):
    getattr(cases, case)(rank, size)
print(f"rank {rank} of {size} is done on {os.uname().nodename}", flush=True)
dist.destroy_process_group()
