"""`python -m stoker.plan.probe JSON`: one process of a measurement; the last line on stdout is its result, as JSON.

Two kinds: `collectives` (two processes on the loopback, gloo, which carries what goes between hosts) and `step` (the
processes of one node, each on its cores, train a model of given size with DDP over ccl).
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import statistics
import sys
import time
from typing import Any

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main(word: str) -> None:
    told: dict[str, Any] = json.loads(word)
    if hasattr(ctypes.CDLL(None), "prctl"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # nobody measures for a plan that was ended
    os.sched_setaffinity(0, told["cpus"])
    os.environ["OMP_NUM_THREADS"] = str(len(told["cpus"]))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(len(told["cpus"]))
    if told["size"] > 1:
        from stoker.comm.registration import register

        register()
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        where = f"tcp://127.0.0.1:{told['port']}"
        dist.init_process_group(told["backend"], init_method=where, rank=told["rank"], world_size=told["size"])
    print(json.dumps(collectives(told) if told["what"] == "collectives" else steps(told)), flush=True)
    if told["size"] > 1:
        dist.barrier()
        dist.destroy_process_group()


def collectives(told: dict[str, Any]) -> dict[str, float]:
    """Seconds and CPU seconds per byte of an allreduce, and of making and applying an average."""
    import torch
    import torch.distributed as dist

    found: dict[str, float] = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        x = torch.ones(told["megabytes"] * 1_000_000 // dtype.itemsize, dtype=dtype)
        walls, works = [], []
        for _ in range(told["rounds"] + 1):
            dist.barrier()
            wall, work = time.perf_counter(), time.process_time()
            dist.all_reduce(x)
            walls.append(time.perf_counter() - wall)
            works.append(time.process_time() - work)
            x.fill_(1.0)
        size = x.numel() * dtype.itemsize
        found[name] = statistics.median(walls[1:]) / size
        found[f"{name}_cpu"] = statistics.median(works[1:]) / size
    anchor, weights = torch.ones(8_000_000), torch.ones(8_000_000)
    spent = []
    for _ in range(3):
        begin = time.perf_counter()
        move = (anchor - weights).div_(2)
        anchor.sub_(move)
        weights.copy_(anchor)
        spent.append((time.perf_counter() - begin) / 32e6)
    found["apply"] = min(spent)
    return found


def steps(told: dict[str, Any]) -> dict[str, float]:
    """The median step of a model with random weights on rows of random tokens."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    import stoker
    from stoker.hf.ranks import BUCKET_MB
    from stoker.plan.subject import Subject

    subject = Subject(**told["subject"])
    model = subject.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    stoker.optimize(model, optimizer, dtype=torch.float32)
    wrapped: Any = model
    if told["size"] > 1:
        wrapped = DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB, gradient_as_bucket_view=True)
    rows = told["batch"] // told["size"] + (told["rank"] < told["batch"] % told["size"])
    seconds = []
    for number in range(told["rounds"] + 1):
        inputs = subject.rows(rows, number * told["size"] + told["rank"], model.config)
        begin = time.perf_counter()
        wrapped(**inputs).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        model.zero_grad()
        seconds.append(time.perf_counter() - begin)
    embedded = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Embedding))
    parameters = sum(p.numel() for p in model.parameters())
    return {"step": statistics.median(seconds[1:]), "parameters": parameters, "last": embedded / parameters}


if __name__ == "__main__":
    main(sys.argv[1])
