"""Run by every rank on the fake hosts: operations that one rank stays away from, and what the others are told, as JSON.

Ranks 0 and 3 go through the compiled door, 1 and 2 through the one in Python: both lead a host, and both follow.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from datetime import timedelta

os.environ["STOKER_CCL_BACKEND"] = "python" if os.environ["RANK"] in "12" else "auto"

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
told = {}
for name, (ranks, absent, operation) in CASES.items():
    group = dist.new_group(ranks, timeout=timedelta(seconds=1))
    if rank in ranks and rank != absent:
        try:
            operation(group)
            told[name] = "no error"
        except RuntimeError as error:
            told[name] = " ".join(str(error).split())
    dist.barrier()  # of all ranks, with more patience: so long the one is away
print(json.dumps(told), flush=True)
