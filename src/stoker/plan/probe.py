"""`python -m stoker.plan.probe JSON`: one process of a measurement; the last line on stdout is its result, as JSON.

Two kinds: `collectives` (two processes over the loopback interface with gloo, the transport between hosts) and `step` (the
processes of one node, each on its cores, train a model of a given size with DDP over ccl).
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import statistics
import sys
import time
from typing import Any

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main(text: str) -> None:
    request: dict[str, Any] = json.loads(text)
    if hasattr(ctypes.CDLL(None), "prctl"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # ends with the process that started it
    os.sched_setaffinity(0, request["cpus"])
    os.environ["OMP_NUM_THREADS"] = str(len(request["cpus"]))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(len(request["cpus"]))
    if request["size"] > 1:
        from stoker.comm.registration import register

        register()
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        rank, size = request["rank"], request["size"]
        store = dist.FileStore(request["store"], size)
        dist.init_process_group(request["backend"], store=store, rank=rank, world_size=size)
    print(json.dumps(collectives(request) if request["what"] == "collectives" else steps(request)), flush=True)
    if request["size"] > 1:
        dist.barrier()
        dist.destroy_process_group()


def collectives(request: dict[str, Any]) -> dict[str, float]:
    """Seconds and CPU seconds per byte of an allreduce, and seconds per byte to compute and apply an average."""
    import torch
    import torch.distributed as dist

    found: dict[str, float] = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        x = torch.ones(request["megabytes"] * 1_000_000 // dtype.itemsize, dtype=dtype)
        walls, works = [], []
        for _ in range(request["rounds"] + 1):
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
    spent = []
    for _ in range(3):
        begin = time.perf_counter()
        weights.copy_(anchor.to(torch.bfloat16))
        spent.append((time.perf_counter() - begin) / 32e6)
    found["cast"] = min(spent)
    return found


def steps(request: dict[str, Any]) -> dict[str, float]:
    """The median step of a model with random weights on rows of random tokens, and the memory at its peak."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    import stoker
    from stoker.hf.ranks import BUCKET_MB
    from stoker.plan.gradient_times import GradientTimes
    from stoker.plan.subject import Subject

    subject = Subject(**request["subject"])
    model = subject.build()
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
    stoker.optimize(model, optimizer, dtype=torch.float32)
    wrapped: Any = model
    if request["size"] > 1:
        wrapped = DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB, gradient_as_bucket_view=True)
    rows = request["batch"] // request["size"] + (request["rank"] < request["batch"] % request["size"])
    seconds, times = [], GradientTimes(model)
    for number in range(request["rounds"] + 1):
        inputs = subject.rows(rows, number * request["size"] + request["rank"], model.config)
        begin = time.perf_counter()
        loss = wrapped(**inputs).loss
        times.begin()
        loss.backward()
        times.end()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        model.zero_grad()
        seconds.append(time.perf_counter() - begin)
    return {
        "step": statistics.median(seconds[1:]), "backward": statistics.median(times.seconds[1:]), "parameters": times.total,
        **{f"ready{part}": share for part, share in enumerate(times.ready)},
        "tokens": int(inputs["attention_mask"].sum()), "memory": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1])
