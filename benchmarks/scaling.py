"""A training step of BERT-base QA by several ranks: on one host, over two fake hosts with shaped links, and as planned.

    python benchmarks/scaling.py                        2 ranks x 1 core against 1 rank x 2 cores, one host
    python benchmarks/scaling.py --hosts 2 --rates 1gbit 10gbit
                                                        two fake hosts (root), one core each: fp32, bf16, local SGD; and the
                                                        predictions of the plan beside what was measured
    python benchmarks/scaling.py --hosts 4 --rates 10gbit
                                                        four, each with an equal share of the cores
    python benchmarks/scaling.py --buckets 25 100 400   DDP's bucket size, one host

Global batch 12, real SQuAD lengths (benchmarks/lengths.py), random weights. All sides keep their processes for the whole run
and take their steps in turn; medians. A step of local SGD is one without communication plus 1/K of an average, and one with A
accumulated batches is A - 1 without communication plus one with it.

Where there are more hosts than cores, a quota of the kernel gives each the same share, also while others wait for the network:
else the core of a host that waits would make another one faster, and communication would seem to cost less than it does.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
BARS = {"2 ranks x 1 core": 0.95, "10gbit bf16": {2: 0.95, 4: 0.9}, "1gbit bf16": 0.9}
PREDICTED = 0.07
"""How far a prediction of the plan may be off."""
ACCUMULATED = 4
_QUOTA = 0.9
"""The share of the cores that all hosts together may use; the rest is for the kernel, which moves their packets."""
_PERIOD = 20_000  # microseconds


@dataclass(frozen=True, kw_only=True)
class Rank:
    """What one process needs to know."""

    rank: int = 0
    size: int = 1
    cpus: tuple[int, ...]
    address: str = "127.0.0.1"
    port: int = 0
    backend: str = "ccl"
    bucket_mb: int = 100
    quota: float = 0.0
    """The share of a core that this process may use; 0: all."""
    modes: bool = False
    """Whether the way gradients meet can be changed from step to step; costs a pass over them."""
    layers: int = 12
    hidden: int = 768


def serve(told: Rank) -> None:
    """One rank: a line on stdin is a step (`step N MODE`), an average, or `times`; the answer is its seconds."""
    os.sched_setaffinity(0, told.cpus)
    os.environ.update(OMP_NUM_THREADS=str(len(told.cpus)))
    import torch
    import torch.distributed as dist

    sys.path.insert(0, str(HERE))
    torch.set_num_threads(len(told.cpus))
    if told.size > 1:
        from stoker.comm.registration import register

        register()
        os.environ.update(MASTER_ADDR=told.address, MASTER_PORT=str(told.port))
        dist.init_process_group(told.backend, rank=told.rank, world_size=told.size)
    step, average, times = _training(told)
    print("ready", flush=True)
    for line in sys.stdin:
        words = line.split()
        if words[0] == "times":  # of the last step, which had no communication
            print(json.dumps([times.seconds[-1], *times.ready]), flush=True)
            continue
        if told.size > 1:
            dist.barrier()
        begin = time.perf_counter()
        if words[0] == "average":
            average()
        else:
            step(int(words[1]), words[2])
        print(time.perf_counter() - begin, flush=True)
    os._exit(0)


def limit_cpu_time(pid: int, share: float) -> None:
    """Moves a process into a group of its own that may use a share of one core."""
    v1 = Path("/sys/fs/cgroup/cpu")
    group = (v1 if v1.is_dir() else Path("/sys/fs/cgroup")) / f"stoker-scaling-{pid}"
    group.mkdir()
    quota = int(share * _PERIOD)
    if v1.is_dir():
        (group / "cpu.cfs_period_us").write_text(str(_PERIOD))
        (group / "cpu.cfs_quota_us").write_text(str(quota))
    else:
        (group / "cpu.max").write_text(f"{quota} {_PERIOD}")
    (group / "cgroup.procs").write_text(str(pid))


def remove_groups() -> None:
    for root in ("/sys/fs/cgroup/cpu", "/sys/fs/cgroup"):
        for group in Path(root).glob("stoker-scaling-*"):
            with suppress(OSError):  # in use by another run
                group.rmdir()


def _training(told: Rank) -> tuple[Callable[[int, str], None], Callable[[], None], Any]:
    import torch
    from torch.nn.parallel import DistributedDataParallel
    from train_step import CASES, build_model

    import stoker
    from stoker.distributed.balance import deal
    from stoker.distributed.local_sgd import LocalSGD
    from stoker.plan.gradient_times import GradientTimes

    case = replace(CASES["bert-qa"], layers=told.layers, hidden=told.hidden)
    model = build_model(case)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-5, fused=True)
    stoker.optimize(model, optimizer, dtype=torch.float32)
    wrapped: Any = model
    mode, local = {"now": "fp32"}, None
    if told.size > 1:
        local = LocalSGD(model, 1)
        wrapped = DistributedDataParallel(model, bucket_cap_mb=told.bucket_mb, gradient_as_bucket_view=True)
        wrapped.broadcast_buffers = False
        if told.modes:
            wrapped.register_comm_hook(None, _hook(mode))

    times = GradientTimes(model)

    def backward(inputs: Any) -> None:
        loss = wrapped(**inputs).loss
        times.begin()
        loss.backward()
        times.end()

    def step(number: int, how: str) -> None:
        mode["now"] = how
        lengths = case.lengths[number % len(case.lengths)]
        mine = [lengths[i] for i in deal(lengths, told.size)[told.rank]]
        inputs = _batch(replace(case, lengths=(tuple(mine),)), number)
        if how == "alone" and told.size > 1:
            with wrapped.no_sync():
                backward(inputs)
        else:
            backward(inputs)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        model.zero_grad()

    return step, (lambda: local.average() if local else None), times


def _batch(case: Any, number: int) -> dict[str, Any]:
    from train_step import batch

    return batch(case, number, None)


def _hook(mode: dict[str, str]) -> Any:
    import torch.distributed as dist

    from stoker.distributed.compression import Bf16Hook

    small = Bf16Hook()

    def meet(state: Any, bucket: Any) -> Any:
        if mode["now"] == "bf16":
            return small(state, bucket)
        gradient = bucket.buffer().div_(dist.get_world_size())
        return dist.all_reduce(gradient, async_op=True).get_future().then(lambda done: done.value()[0])

    meet.__annotations__ = {}  # DDP would compare them, as text, with its own types
    return meet


class Side:
    """The processes of one side; `run` is one step by all of them."""

    def __init__(self, ranks: list[Rank], command: Callable[[Rank, list[str]], list[str]] | None = None) -> None:
        self.processes = []
        for told in ranks:
            words = [sys.executable, str(HERE / "scaling.py"), "--serve", json.dumps(asdict(told))]
            words = command(told, words) if command else words
            self.processes.append(
                subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
            )
            if told.quota:  # from outside, because a fake host has a /sys of its own
                limit_cpu_time(self.processes[-1].pid, told.quota)
        for process in self.processes:
            while (line := self._line(process)) != "ready":
                print(f"  {line}", file=sys.stderr)

    def _line(self, process: Any) -> str:
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"a rank ended with exit code {process.wait()}")
        return str(line).strip()

    def run(self, order: str) -> float:
        """Seconds until the last rank was done."""
        return max(map(float, self.ask(order)))

    def ask(self, order: str) -> list[str]:
        for process in self.processes:
            process.stdin.write(order + "\n")
        return [self._line(process) for process in self.processes]

    def close(self) -> None:
        for process in self.processes:
            process.stdin.close()
        for process in self.processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def job(size: int, cpus: list[int], **more: Any) -> list[Rank]:
    each = len(cpus) // size
    port = more.pop("port", None) or free_port()
    return [
        Rank(rank=r, size=size, cpus=tuple(cpus[r * each : (r + 1) * each]), port=port, **more) for r in range(size)
    ]


@contextmanager
def closing(side: Side) -> Iterator[Side]:
    try:
        yield side
    finally:
        side.close()


def in_turn(sides: dict[str, Callable[[int], float]], steps: int, warm_up: int = 2) -> dict[str, list[float]]:
    """`steps` timed runs of every side, after some that are not."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(steps + warm_up):
        told = []
        for name, run in sides.items():
            seconds = run(number)
            told.append(f"{name} {seconds:.3f}")
            if number >= warm_up:
                found[name].append(seconds)
        print(f"  {'warm up' if number < warm_up else number + 1 - warm_up}: {', '.join(told)}", flush=True)
    return found


def one_host(options: argparse.Namespace, cpus: list[int], size: dict[str, int]) -> dict[str, list[float]]:
    with ExitStack() as stack:
        alone = stack.enter_context(closing(Side(job(1, cpus, **size))))
        sides = {"1 rank x all cores": lambda n: alone.run(f"step {n} fp32")}
        for backend in options.backend:
            two = stack.enter_context(closing(Side(job(len(cpus), cpus, backend=backend, **size))))
            name = f"{len(cpus)} ranks x 1 core" + (f", {backend}" if backend != "ccl" else "")
            sides[name] = lambda n, two=two: two.run(f"step {n} fp32")  # type: ignore[misc]
        return in_turn(sides, options.steps)


def bucket_sizes(options: argparse.Namespace, cpus: list[int], size: dict[str, int]) -> dict[str, list[float]]:
    with ExitStack() as stack:
        sides = {}
        for megabytes in options.buckets:
            side = stack.enter_context(closing(Side(job(len(cpus), cpus, bucket_mb=megabytes, **size))))
            sides[f"{megabytes} MB"] = lambda n, side=side: side.run(f"step {n} fp32")  # type: ignore[misc]
        return in_turn(sides, options.steps)


def several_hosts(options: argparse.Namespace, cpus: list[int], size: dict[str, int]) -> dict[str, list[float]]:
    """Leaves in `options.times` when gradients are complete, as the plan needs it."""
    sys.path.insert(0, str(HERE.parent / "tests"))
    from rig import Rig

    count = options.hosts
    share = options.share = 1.0 if count <= len(cpus) else _QUOTA * len(cpus) / count
    with Rig(count) as rig, ExitStack() as stack:
        stack.callback(remove_groups)
        common = {
            "address": rig.address(rig.hosts[0]),
            "port": 29533,
            "modes": True,
            "bucket_mb": options.bucket_mb,
            **size,
        }
        ranks = [
            Rank(rank=r, size=count, cpus=(cpus[r % len(cpus)],), quota=share if share < 1 else 0.0, **common)
            for r in range(count)
        ]
        apart = stack.enter_context(closing(Side(ranks, lambda told, words: rig.command(rig.hosts[told.rank], words))))

        def shaped(rate: str, order: str) -> Callable[[int], float]:
            def run(number: int) -> float:
                rig.shape(rate=rate)
                return apart.run(order.format(number))

            return run

        measured: list[list[float]] = []

        def without(number: int) -> float:
            seconds = apart.run(f"step {number} alone")
            measured.append(max((json.loads(line) for line in apart.ask("times")), key=lambda one: one[0]))
            return seconds

        sides: dict[str, Callable[[int], float]] = {"no communication": without}
        for rate in options.rates:
            sides[f"{rate} fp32"] = shaped(rate, "step {} fp32")
            sides[f"{rate} bf16"] = shaped(rate, "step {} bf16")
            sides[f"{rate} average"] = shaped(rate, "average")
        found = in_turn(sides, options.steps, warm_up=1)
        options.times = measured[1:]
        return found


def against_plan(options: argparse.Namespace, middles: dict[str, float], parameters: int) -> float:
    """Prints the predictions of `stoker plan`, from the step without communication; returns the largest error."""
    from stoker.plan.cost_model import Network, Node, Setup, predict
    from stoker.plan.link_rates import measure_collectives

    rates = measure_collectives()
    alone = middles["no communication"]
    columns = [statistics.median(column) for column in zip(*options.times, strict=True)]
    node = Node(step=alone, processes=1, parameters=parameters, collectives=rates, cores=options.share,
                backward=columns[0] / alone, ready=tuple(columns[1:]))  # fmt: skip
    print(
        f"the backward pass takes {columns[0]:.2f} s; the plan against these runs (collectives here: {rates.summary()}):"
    )
    worst = 0.0
    for rate in options.rates:
        network = Network.parse(rate)
        for label, setup in (
            ("fp32", Setup(bucket_mb=options.bucket_mb)),
            ("bf16", Setup(compression="bf16", bucket_mb=options.bucket_mb)),
            (f"local SGD {options.local_sgd}", Setup(local_sgd=options.local_sgd)),
        ):
            seen, said = middles[f"{rate} {label}"], predict(node, network, options.hosts, setup).step
            worst = max(worst, abs(said / seen - 1))
            print(f"  {rate} {label:14}{said:8.3f} s planned {seen:8.3f} s measured {100 * (said / seen - 1):+6.1f}%")
    return worst


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument(
        "--hosts", type=int, default=0, metavar="N", help="2 to 4 fake hosts instead of one; needs root"
    )
    parser.add_argument("--rates", nargs="+", default=["1gbit"], help="of the links between the hosts")
    parser.add_argument("--local_sgd", type=int, default=16, metavar="K")
    parser.add_argument("--bucket_mb", type=int, default=25, help="DDP's bucket size with --hosts")
    parser.add_argument("--buckets", type=int, nargs="+", help="compare these bucket sizes instead, in MB")
    parser.add_argument("--backend", nargs="+", default=["ccl"], choices=["ccl", "gloo"])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768)
    options = parser.parse_args()
    if options.serve:
        found = json.loads(options.serve)
        serve(Rank(**{**found, "cpus": tuple(found["cpus"])}))
    cpus = sorted(os.sched_getaffinity(0))
    size = {"layers": options.layers, "hidden": options.hidden}
    run = several_hosts if options.hosts else bucket_sizes if options.buckets else one_host
    taken = run(options, cpus, size)
    for rate in options.rates if options.hosts else ():
        alone = taken["no communication"]
        both = zip(alone, taken[f"{rate} average"], strict=True)
        taken[f"{rate} local SGD {options.local_sgd}"] = [step + mean / options.local_sgd for step, mean in both]
        for how in ("fp32", "bf16"):
            both = zip(alone, taken[f"{rate} {how}"], strict=True)
            taken[f"{rate} {how}, {ACCUMULATED} accumulated, per batch"] = [
                ((ACCUMULATED - 1) * step + last) / ACCUMULATED for step, last in both
            ]
    base, missed = next(iter(taken)), 0
    middles = {}
    for name, values in taken.items():
        # Batches differ in length: each step is compared with the same step of the first side.
        ratio = statistics.median(ours / mine for ours, mine in zip(taken[base], values, strict=True))
        middles[name] = statistics.median(taken[base]) / ratio
        bar: Any = next(
            (value for word, value in BARS.items() if name == word or (word in name and not options.hosts)), None
        )
        bar = bar.get(options.hosts) if isinstance(bar, dict) else bar
        missed += bar is not None and ratio < bar
        told = f" (bar {bar}x)" if bar is not None else ""
        print(f"{name:40}{statistics.median(values):8.3f} s {ratio:6.2f}x of {base}{told}", flush=True)
    if options.hosts:
        from train_step import CASES, build_model

        case = replace(CASES["bert-qa"], layers=options.layers, hidden=options.hidden)
        missed += against_plan(options, middles, sum(p.numel() for p in build_model(case).parameters())) > PREDICTED
    return int(missed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
