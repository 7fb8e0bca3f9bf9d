"""Run by every rank on the fake hosts: operations that one rank does not join, and the errors of the others, as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from stoker.comm.registration import register

register()
torch.set_num_threads(1)
dist.init_process_group("ccl", timeout=timedelta(seconds=60))
rank = dist.get_rank()
CASES: dict[str, tuple[list[int], int, Callable[[dist.ProcessGroup], object]]] = {
    "behind a leader": ([0, 1, 2, 3], 3, lambda group: dist.all_reduce(torch.ones(10), group=group)),
    "of a sub-group": ([1, 2, 3], 1, lambda group: dist.broadcast(torch.ones(4), 1, group=group)),
}
errors = {}
for name, (ranks, absent, operation) in CASES.items():
    group = dist.new_group(ranks, timeout=timedelta(seconds=1))
    if rank in ranks and rank != absent:
        try:
            operation(group)
            errors[name] = "no error"
        except RuntimeError as error:
            errors[name] = " ".join(str(error).split())
    dist.barrier()  # of all ranks, with a longer timeout: the absent rank waits here
print(json.dumps(errors), flush=True)
