"""Run by every rank of a job whose ccl cannot be compiled: collectives that gloo has, DDP, sub-groups. Prints one JSON line.

`gloo_fallback.py [no-headers]`: with `no-headers` Python's headers seem not to be installed.
"""

from __future__ import annotations

import json
import sys
import sysconfig
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist

from comm import cases
from stoker.comm.registration import register

if "no-headers" in sys.argv:
    found = sysconfig.get_paths()
    sysconfig.get_paths = lambda *args, **kwargs: {**found, "include": "/nonexistent"}  # type: ignore[assignment]
register()
torch.set_num_threads(1)
dist.init_process_group("ccl")
rank, size = dist.get_rank(), dist.get_world_size()
cases.allreduce(rank, size, "SUM", "float32")
for case in (
    "barrier",
    "objects",
    "sub_groups",
    "send_and_receive",
    "data_parallel",
    "async_work",
    "functional_collectives",
):
    getattr(cases, case)(rank, size)
print(json.dumps({"backend": dist.get_backend(), "serves": dist.group.WORLD._get_backend(torch.device("cpu")).name()}))
dist.destroy_process_group()
