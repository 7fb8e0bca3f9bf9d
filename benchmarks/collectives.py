"""Allreduce of ccl against gloo, in turns in the same processes: medians, and the ratio that matters.

python benchmarks/collectives.py                 # 2 ranks, 400 MB fp32 and bf16, 4 KB latency
python benchmarks/collectives.py --busy          # the same while every core is kept busy by another process
python benchmarks/collectives.py --hosts 2       # 2 fake hosts with 2 ranks each, joined by 10 Gbit/s; needs root
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
QUIET_BARS = {"float32": 5.0, "bfloat16": 5.0, "latency": 5.0}
BUSY_BARS = {"float32": 1.0, "bfloat16": 1.0, "latency": 1.0}
HOSTS_BARS = {"float32": 1.5, "bfloat16": 1.0, "latency": 1.0}


def work(megabytes: int, rounds: int) -> None:
    """One rank: every case in turns on both backends; the first rank prints a line of JSON per case."""
    import torch
    import torch.distributed as dist

    from stoker.comm.registration import register

    register()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    groups = {name: dist.new_group(backend=name) for name in ("gloo", "ccl")}
    cases = (
        ("float32", f"{megabytes} MB float32", torch.float32, megabytes * 250_000, rounds),
        ("bfloat16", f"{megabytes} MB bfloat16", torch.bfloat16, megabytes * 500_000, rounds),
        ("latency", "4 KB float32", torch.float32, 1024, 300),
    )
    for case, label, dtype, count, repeats in cases:
        x = torch.ones(count, dtype=dtype)
        seconds: dict[str, list[float]] = {name: [] for name in groups}
        copies = []
        for turn in range(repeats + 1):
            for name, group in groups.items():
                x.fill_(1.0)
                dist.barrier(groups["ccl"])
                start = time.perf_counter()
                dist.all_reduce(x, group=group)
                if turn:  # the first warms up
                    seconds[name].append(time.perf_counter() - start)
            dist.barrier(groups["ccl"])
            start = time.perf_counter()
            x.mul_(1.0)  # reads and writes every byte once: no allreduce can do with less
            copies.append(time.perf_counter() - start)
        if dist.get_rank() == 0:
            medians = {name: statistics.median(values) for name, values in seconds.items()}
            floor = statistics.median(copies)
            print(json.dumps([case, label, count * x.element_size(), medians, floor]), flush=True)
    dist.barrier()
    dist.destroy_process_group()


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="per host")
    parser.add_argument("--hosts", type=int, default=1, help="fake hosts, by network namespaces")
    parser.add_argument("--rate", default="10gbit", help="of the links between the hosts")
    parser.add_argument("--megabytes", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--busy", action="store_true", help="keep every core busy with another process")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.megabytes, options.rounds)
        return 0
    bars = BUSY_BARS if options.busy else HOSTS_BARS if options.hosts > 1 else QUIET_BARS
    words = [
        sys.executable,
        __file__,
        "--worker",
        "--megabytes",
        str(options.megabytes),
        "--rounds",
        str(options.rounds),
    ]
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
            limit = "" if case == "latency" else f"; reading and writing it once takes {floor * 1e6:.0f} us"
            print(f"{label}: {rates}; ccl is {ratio:.1f}x as fast (bar {bars[case]:g}x){limit}", flush=True)
        for process in workers:
            process.wait()
    for process in burners:
        process.kill()
        process.wait()
    return int(missed > 0 or shown < 3)


if __name__ == "__main__":
    raise SystemExit(main())
