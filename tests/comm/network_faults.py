"""Run by every rank on the fake hosts while a test breaks something between them: allreduces until a file appears or an
operation fails, and prints the outcome."""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from stoker.comm.registration import register

seconds, count, stop = float(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
register()
torch.set_num_threads(1)
dist.init_process_group("ccl", timeout=timedelta(seconds=60))
group = dist.new_group(timeout=timedelta(seconds=seconds))
rank, size = dist.get_rank(), dist.get_world_size()
x = torch.empty(count)
print("READY", flush=True)
start, steps = time.monotonic(), 0
try:
    while True:
        x.fill_(float(rank))
        x[-1] = float(stop.exists())  # all ranks end together: the first to see the file passes it on
        dist.all_reduce(x, group=group)
        steps += 1
        assert x[0].item() == x[-2].item() == sum(range(size)), x
        if x[-1].item():
            break
except RuntimeError as error:
    print(f"FAILED after {time.monotonic() - start:.1f} s: {' '.join(str(error).split())}", flush=True)
    os._exit(3)  # what follows an error is not tested
print(f"DONE after {steps} allreduces", flush=True)
dist.destroy_process_group()
