"""Allreduce of ccl against gloo on this host, in turns in the same processes: medians, and the ratio that matters.

python benchmarks/collectives.py                 # 2 ranks, 400 MB fp32 and bf16, 4 KB latency
python benchmarks/collectives.py --busy          # the same while every core is kept busy by another process
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import statistics
import time
from typing import Any

BARS = {"400 MB float32": 5.0, "400 MB bfloat16": 5.0, "4 KB float32": 5.0}
BUSY_BAR = 1.0


def _rank(rank: int, ranks: int, port: int, megabytes: int, rounds: int, results: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    import torch
    import torch.distributed as dist

    from stoker.comm.registration import register

    register()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    groups = {name: dist.new_group(backend=name) for name in ("gloo", "ccl")}
    cases = (
        (f"{megabytes} MB float32", torch.float32, megabytes * 250_000, rounds),
        (f"{megabytes} MB bfloat16", torch.bfloat16, megabytes * 500_000, rounds),
        ("4 KB float32", torch.float32, 1024, 300),
    )
    for label, dtype, count, repeats in cases:
        x = torch.ones(count, dtype=dtype)
        seconds: dict[str, list[float]] = {name: [] for name in groups}
        for turn in range(repeats + 1):
            for name, group in groups.items():
                x.fill_(1.0)
                dist.barrier(groups["ccl"])
                start = time.perf_counter()
                dist.all_reduce(x, group=group)
                if turn:  # the first warms up
                    seconds[name].append(time.perf_counter() - start)
        if rank == 0:
            size = count * x.element_size()
            results.put((label, size, {name: statistics.median(values) for name, values in seconds.items()}))
    dist.barrier()
    dist.destroy_process_group()


def _burn() -> None:
    while True:
        sum(range(10_000))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--megabytes", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--busy", action="store_true", help="keep every core busy with another process")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results = context.SimpleQueue()
    arguments = (options.ranks, port, options.megabytes, options.rounds, results)
    burners = [context.Process(target=_burn, daemon=True) for _ in range(os.cpu_count() or 1 if options.busy else 0)]
    workers = [context.Process(target=_rank, args=(rank, *arguments), daemon=True) for rank in range(options.ranks)]
    for process in [*burners, *workers]:
        process.start()
    missed = 0
    for _ in range(3):
        label, size, medians = results.get()
        ratio = medians["gloo"] / medians["ccl"]
        bar = BUSY_BAR if options.busy else BARS.get(label, 0.0)
        missed += ratio < bar
        rates = ", ".join(
            f"{name} {value * 1e6:.0f} us ({size / value / 1e9:.2f} GB/s)" for name, value in medians.items()
        )
        print(f"{label}: {rates}; ccl is {ratio:.1f}x as fast (bar {bar:g}x)", flush=True)
    for process in workers:
        process.join()
    for process in burners:
        process.kill()
    return int(missed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
