"""Collectives of ccl against gloo, in turns in the same processes: medians, and the ratio that matters.

python benchmarks/collectives.py                 # 2 ranks: allreduce of 400 MB fp32 and bf16, latency of 4 KB, a new group
python benchmarks/collectives.py --busy          # the same while every core is kept busy by another process
python benchmarks/collectives.py --matrix        # every collective from 4 KB to 100 MB; --ranks 4, 8 for more than cores
python benchmarks/collectives.py --hosts 2       # 2 fake hosts with 2 ranks each, joined by 10 Gbit/s; needs root
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from stoker.bench.collectives import allreduce, in_turns, join

ROOT = Path(__file__).resolve().parent.parent
QUIET_BARS = {"float32": 5.0, "bfloat16": 5.0, "latency": 5.0, "group": 1.0}
BUSY_BARS = {"float32": 1.0, "bfloat16": 1.0, "latency": 1.0, "group": 0.0}
HOSTS_BARS = {"float32": 1.5, "bfloat16": 1.0, "latency": 1.0, "group": 0.0}
MATRIX_BAR = 1.0
MATRIX_BYTES = (4 << 10, 64 << 10, 1 << 20, 10_000_000, 100_000_000)


def work_on_matrix() -> None:
    """One rank of --matrix: every collective with every size; the first rank prints a line of JSON for each pair."""
    import torch
    import torch.distributed as dist

    groups = join()
    rank, size = dist.get_rank(), dist.get_world_size()

    def exchange(x: torch.Tensor, y: torch.Tensor, group: Any) -> None:
        """The first two ranks send to each other; the others have nothing to do."""
        if rank < 2:
            works = [dist.isend(x, 1 - rank, group=group), dist.irecv(y, 1 - rank, group=group)]
            for work in works:
                work.wait()

    calls: dict[str, Callable[[Any, list[torch.Tensor], list[torch.Tensor], Any], object]] = {
        "all_reduce": lambda x, xs, ys, group: dist.all_reduce(x, group=group),
        "reduce": lambda x, xs, ys, group: dist.reduce(x, 0, group=group),
        "broadcast": lambda x, xs, ys, group: dist.broadcast(x, 0, group=group),
        "all_gather": lambda x, xs, ys, group: dist.all_gather(ys, xs[0], group=group),
        "gather": lambda x, xs, ys, group: dist.gather(xs[0], ys if rank == 0 else None, 0, group=group),
        "scatter": lambda x, xs, ys, group: dist.scatter(ys[0], xs if rank == 0 else None, 0, group=group),
        "reduce_scatter": lambda x, xs, ys, group: dist.reduce_scatter(ys[0], xs, group=group),
        "all_to_all": lambda x, xs, ys, group: dist.all_to_all(ys, xs, group=group),
        "send and recv": lambda x, xs, ys, group: exchange(xs[0], ys[0], group),
    }
    for nbytes in MATRIX_BYTES:
        count = nbytes // 4 // size * size
        x = torch.zeros(count)  # sums stay the same
        xs, ys = list(x.chunk(size)), list(torch.empty(count).chunk(size))
        for name, call in calls.items():
            repeats = max(3, min(100, 20_000_000 // nbytes))
            medians = in_turns(groups, repeats, functools.partial(call, x, xs, ys))
            if rank == 0:
                print(json.dumps([name, nbytes, medians]), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def work(megabytes: int, rounds: int) -> None:
    """One rank: every case in turns on both backends; the first rank prints a line of JSON per case."""
    import torch
    import torch.distributed as dist

    groups = join()
    cases = (
        ("float32", f"{megabytes} MB float32", torch.float32, megabytes * 250_000, rounds),
        ("bfloat16", f"{megabytes} MB bfloat16", torch.bfloat16, megabytes * 500_000, rounds),
        ("latency", "4 KB float32", torch.float32, 1024, 300),
    )
    for case, label, dtype, count, repeats in cases:
        x = torch.zeros(count, dtype=dtype)  # sums stay the same
        medians = in_turns(groups, repeats, functools.partial(allreduce, x))
        copies = []
        for _ in range(repeats):
            dist.barrier(groups["ccl"])
            start = time.perf_counter()
            x.mul_(1.0)  # reads and writes every byte once: no allreduce can do with less
            copies.append(time.perf_counter() - start)
        if dist.get_rank() == 0:
            print(json.dumps([case, label, count * x.element_size(), medians, statistics.median(copies)]), flush=True)
    medians = new_groups(list(groups))
    if dist.get_rank() == 0:
        print(json.dumps(["group", "a new group and its first allreduce", 4, medians, 0.0]), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def new_groups(backends: list[str]) -> dict[str, float]:
    """The median time until a new group has done an allreduce."""
    import torch
    import torch.distributed as dist

    seconds: dict[str, list[float]] = {name: [] for name in backends}
    for _ in range(20):
        for name in backends:
            dist.barrier()
            start = time.perf_counter()
            group = dist.new_group(backend=name)
            dist.all_reduce(torch.ones(1), group=group)
            seconds[name].append(time.perf_counter() - start)
            dist.destroy_process_group(group)
            del group  # here, and not while the next one is timed: gloo's ends in 20 ms
    return {name: statistics.median(values) for name, values in seconds.items()}


@contextlib.contextmanager
def ranks_here(count: int, words: list[str]) -> Iterator[list[subprocess.Popen[str]]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    base = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    yield [
        subprocess.Popen(
            words, env={**base, "RANK": str(rank), "WORLD_SIZE": str(count)}, stdout=subprocess.PIPE, text=True
        )
        for rank in range(count)
    ]


@contextlib.contextmanager
def ranks_on_hosts(hosts: int, each: int, rate: str, words: list[str]) -> Iterator[list[subprocess.Popen[str]]]:
    sys.path.insert(0, str(ROOT / "tests"))
    from rig import Rig, oneccl_environment

    with Rig(hosts) as rig:
        rig.shape(rate=rate)
        base = {"MASTER_ADDR": rig.address(rig.hosts[0]), "MASTER_PORT": "29511", "GLOO_SOCKET_IFNAME": "eth0"}
        base |= {"WORLD_SIZE": str(hosts * each), **(oneccl_environment() or {})}
        yield [
            subprocess.Popen(
                rig.command(rig.hosts[rank // each], words),
                env=rig.environment({**base, "RANK": str(rank)}),
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(hosts * each)
        ]


def show_matrix(workers: list[subprocess.Popen[str]]) -> int:
    """A table of how many times as fast as gloo ccl is; 1 if it is slower somewhere."""
    ratios: dict[str, dict[int, float]] = {}
    assert workers[0].stdout is not None
    for line in workers[0].stdout:
        if line.startswith("["):
            name, nbytes, medians = json.loads(line)
            ratios.setdefault(name, {})[nbytes] = medians["gloo"] / medians["ccl"]
    codes = [process.wait() for process in workers]
    print(f"ccl against gloo, {len(workers)} ranks on {os.cpu_count()} cores: how many times as fast (float32)")
    sizes = [f"{nbytes / 1000:.0f} KB" if nbytes < 1_000_000 else f"{nbytes / 1e6:.0f} MB" for nbytes in MATRIX_BYTES]
    print(f"{'':16}" + "".join(f"{size:>9}" for size in sizes))
    for name, row in ratios.items():
        print(f"{name:16}" + "".join(f"{row[nbytes]:8.1f}x" for nbytes in row))
    slower = any(ratio < MATRIX_BAR for row in ratios.values() for ratio in row.values())
    return int(slower or any(codes) or not ratios)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="per host")
    parser.add_argument("--hosts", type=int, default=1, help="fake hosts, by network namespaces")
    parser.add_argument("--rate", default="10gbit", help="of the links between the hosts")
    parser.add_argument("--megabytes", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--busy", action="store_true", help="keep every core busy with another process")
    parser.add_argument("--matrix", action="store_true", help="every collective with every size, on one host")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        _ = work_on_matrix() if options.matrix else work(options.megabytes, options.rounds)
        return 0
    words = [
        sys.executable,
        __file__,
        "--worker",
        "--megabytes",
        str(options.megabytes),
        "--rounds",
        str(options.rounds),
    ]
    if options.matrix:
        with ranks_here(options.ranks, [*words, "--matrix"]) as workers:
            return show_matrix(workers)
    bars = BUSY_BARS if options.busy else HOSTS_BARS if options.hosts > 1 else QUIET_BARS
    burn = [sys.executable, "-c", "while True: sum(range(10_000))"]
    burners = [subprocess.Popen(burn) for _ in range(os.cpu_count() or 1 if options.busy else 0)]
    started = (
        ranks_here(options.ranks, words)
        if options.hosts == 1
        else ranks_on_hosts(options.hosts, options.ranks, options.rate, words)
    )
    missed = shown = 0
    with started as workers:
        assert workers[0].stdout is not None
        for line in workers[0].stdout:
            if not line.startswith("["):
                print(line, end="")
                continue
            case, label, size, medians, floor = json.loads(line)
            ratio = medians["gloo"] / medians["ccl"]
            missed += ratio < bars[case]
            shown += 1
            rates = ", ".join(
                f"{name} {value * 1e6:.0f} us ({size / value / 1e9:.2f} GB/s)" for name, value in medians.items()
            )
            limit = "" if case in {"latency", "group"} else f"; reading and writing it once takes {floor * 1e6:.0f} us"
            print(f"{label}: {rates}; ccl is {ratio:.1f}x as fast (bar {bars[case]:g}x){limit}", flush=True)
        for process in workers:
            process.wait()
    for process in burners:
        process.kill()
        process.wait()
    return int(missed > 0 or shown < 4)


if __name__ == "__main__":
    raise SystemExit(main())
