"""Runs the stages of `stoker bench`: as many steps as fit into each stage's time. What was measured stays when it is interrupted.

All measuring is done in processes of their own (`stoker.bench.sides`), forked from one that has imported torch already. This
process asks them for steps, so Ctrl-C ends it between two figures.
"""

from __future__ import annotations

import contextlib
import functools
import math
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from multiprocessing import forkserver
from typing import TextIO, TypeVar

from stoker.bench import bench_cases, collectives, narrow
from stoker.bench.bench_cases import CASES, Cores, Kind, Size
from stoker.bench.bench_results import Allreduce, Disturbance, HostTime, Pair, Results
from stoker.bench.bench_stages import QUICK, STAGES, Budget, Progress
from stoker.bench.sides import Measured, Side, SideFailed, Taken, without_interrupts
from stoker.english import counted, duration
from stoker.errors import UserError
from stoker.machine import Machine, load
from stoker.machine.isa import lowered_by
from stoker.machine.network import free_port

__all__ = ["rank_cores", "run", "thread_counts"]

Name = TypeVar("Name", bound=str)


HOST_CASES = ("bert", "llama-lora")
_SHARE = 0.9
"""Of the free memory that may be used; the rest is for buffers that grow with the number of threads."""
_AT_MOST = 4.0
"""Times the time of a stage, after which a machine so slow has fewer rounds than the least."""
_LONGEST_STEP = 900.0
_LONGEST_START = 300.0
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OMP_PROC_BIND", "OMP_PLACES", "OMP_THREAD_LIMIT", "GOMP_CPU_AFFINITY",
                     "KMP_AFFINITY", "MKL_NUM_THREADS")  # fmt: skip
_PRELOAD = ["torch", "transformers.models.bert.modeling_bert", "transformers.models.llama.modeling_llama", "peft",
            "stoker.model"]  # fmt: skip


@dataclass
class Bench:
    """What all stages need."""

    results: Results
    budget: Budget
    progress: Progress
    method: str
    """How processes are started: by "forkserver" where it works."""
    cores: tuple[int, ...]
    """One logical CPU of each core, those of a NUMA node together; empty if processes are not to be bound."""
    sides: list[Side] = field(default_factory=list)
    """Those that run, or ran in this stage."""

    @property
    def machine(self) -> Machine:
        return self.results.machine

    @property
    def threads(self) -> int:
        return self.machine.usable_threads

    @property
    def bf16_units(self) -> bool:
        return bool(self.results.facts.get("bf16_units"))

    @staticmethod
    def free_memory() -> int | None:
        """Now, because other programs take and return memory."""
        return Machine.read().free_memory

    def cores_for(self, threads: int) -> Cores:
        return Cores(self.cores[:threads], threads)

    def note(self, text: str) -> None:
        self.results.notes.append(text)
        self.progress.note(text)

    @contextlib.contextmanager
    def started(self, builds: Mapping[Name, Callable[[], Callable[..., object]]]) -> Iterator[dict[Name, Side]]:
        """Processes for these sides, built at the same time; all have ended after this block."""
        try:
            for build in builds.values():
                self.sides.append(Side(build, self.method))
            found = dict(zip(builds, self.sides, strict=True))
            for side in found.values():
                side.wait_until_built(_LONGEST_START)
            yield found
        finally:
            failed = sys.exc_info()[1] is not None  # then others may wait for the side that failed
            for side in self.sides:
                side.close(0.0 if failed else 10.0)
            self.sides.clear()

    @contextlib.contextmanager
    def watched(self, *found: Pair | HostTime) -> Iterator[None]:
        """Notes what other programs used meanwhile, also if it ends early."""
        end = load.others_during(self.own_seconds, self.machine.usable_cpus or None)
        try:
            yield
        finally:
            disturbance = Disturbance.of(end())
            for one in found:
                one.disturbance = disturbance

    def own_seconds(self) -> float:
        return time.process_time() + sum(side.cpu_seconds for side in self.sides)


def run(
    stages: Sequence[str], budget: Budget, stream: TextIO, save: Callable[[Results], object] = lambda results: None
) -> Results:
    """Runs the stages and returns what they measured; `save` is called after each. Ctrl-C ends it early."""
    machine = Machine.read()  # before any thread runs
    results = Results(machine, _versions(), quick=budget is QUICK)
    progress = Progress(stages, budget, stream)
    began = time.monotonic()
    with _processes() as (method, log):
        bench = Bench(results, budget, progress, method, _ordered_cores(machine))
        try:
            _start(bench)
            for stage in stages:
                _run_stage(bench, stage)
                results.seconds = time.monotonic() - began
                save(results)
        except KeyboardInterrupt:
            results.interrupted = True
            progress.clear()
        results.seconds = time.monotonic() - began
        results.log = log() if any("failed" in note for note in results.notes) else ""
    save(results)
    return results


def _versions() -> dict[str, str]:
    found = {"Stoker": "stoker", "torch": "torch", "transformers": "transformers", "peft": "peft"}
    versions = {}
    for name, package in found.items():
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(package)
    return versions


def _ordered_cores(machine: Machine) -> tuple[int, ...]:
    """CPUs to bind threads to. None under a quota: processes of other containers may be bound to the first cores as well."""
    cores = sorted(machine.fast_cores, key=lambda core: (core.node, core.number))
    if machine.usable_threads < len(cores):
        return ()
    return tuple(core.cpus[0] for core in cores)


@contextlib.contextmanager
def _processes() -> Iterator[tuple[str, Callable[[], str]]]:
    """How to start processes, and a function that returns what they wrote to standard error, mostly warnings of libraries."""
    with tempfile.TemporaryFile() as file:

        def text() -> str:
            file.seek(0)
            return file.read()[-20_000:].decode(errors="replace")

        before = {name: os.environ.pop(name, None) for name in _THREAD_VARIABLES}
        try:
            method = "forkserver"
            multiprocessing.set_forkserver_preload(_PRELOAD)
            try:
                with without_interrupts(), _standard_error(file.fileno()):
                    forkserver.ensure_running()
            except OSError:  # the path of TMPDIR is too long for a socket
                method = "spawn"
            yield method, text
        finally:
            os.environ |= {name: value for name, value in before.items() if value is not None}


@contextlib.contextmanager
def _standard_error(descriptor: int) -> Iterator[None]:
    kept = os.dup(2)
    try:
        sys.stderr.flush()
        os.dup2(descriptor, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _start(bench: Bench) -> None:
    """Imports torch and transformers once, and notes what would distort figures."""
    bench.progress.now("loading torch and transformers")
    try:
        with bench.started({"facts": bench_cases.loads}) as sides:
            bench.results.facts = sides["facts"].take(0).value
    except SideFailed as failure:
        bench.progress.clear()
        reason = " ".join(str(failure).split())[:300]
        raise UserError(f"stoker bench cannot measure here: {reason}; `stoker selftest` says more") from None
    busy = load.current_load()
    if busy and Disturbance.of(busy).disturbs:
        bench.progress.note(
            f"Other programs keep {busy.busy:.1f} of {busy.cpus} CPUs busy: what they disturb is marked with (!)."
        )
    if lowered := lowered_by():
        bench.note(f"Instruction sets are limited by {lowered}.")
    if bench.machine.quota is not None and bench.threads < len(bench.machine.fast_cores):
        bench.note(f"A quota of {bench.machine.quota:g} CPUs limits this container.")


def _run_stage(bench: Bench, stage: str) -> None:
    bench.progress.begin(stage)
    try:
        if stage in CASES:
            found = _compare(bench, stage)
        else:
            found = {"host": _host, "threads": _sweep, "allreduce": _allreduce}[stage](bench)
    except SideFailed as failure:
        found = "left out"
        bench.note(f"{STAGES[stage]} failed: {' '.join(str(failure).split())[:300]}")
    bench.progress.end(found)


# Training steps


def _compare(bench: Bench, name: str) -> str:
    """Stock and Stoker in fp32 and in bf16; without bf16 units stock takes part in fp32 only."""
    case = CASES[name]
    rival: Kind = "stock bf16" if bench.bf16_units else "stock"
    layers = case.shown_layers(bench.budget.size)
    fp32, bf16 = (
        Pair(name, case.title, "fp32", "stock", bench.threads, layers),
        Pair(name, case.title, "bf16", rival, bench.threads, layers),
    )
    groups: list[list[tuple[Pair, tuple[Kind, Kind]]]] = [[(fp32, ("stock", "stoker")), (bf16, (rival, "stoker bf16"))]]
    free = bench.free_memory()
    if free is not None and _need(case, groups[0], bench.budget.size) > _SHARE * free:
        groups = [[one] for one in groups[0]]  # one precision after the other
        need = max(_need(case, group, bench.budget.size) for group in groups)
        if need > _SHARE * free:
            bench.note(
                f"{case.title} is left out: it needs about {need / 1e9:.0f} GB of memory, and {free / 1e9:.1f} GB are free."
            )
            return "left out"
    for group in groups:
        bench.results.steps += [pair for pair, _ in group]
        _in_turn(bench, case.name, group, bench.budget.seconds[name] / len(groups))
    done = [pair for pair in (fp32, bf16) if pair.measured]
    return ", ".join(f"{pair.faster:.2f}x as fast in {pair.precision}" for pair in done)


def _need(case: bench_cases.StepCase, group: list[tuple[Pair, tuple[Kind, Kind]]], size: Size) -> float:
    return sum(case.need(kind, size) for kind in {kind for _, kinds in group for kind in kinds})


def _in_turn(bench: Bench, name: str, group: list[tuple[Pair, tuple[Kind, Kind]]], seconds: float) -> None:
    kinds = list(dict.fromkeys(kind for _, both in group for kind in both))
    cores, size = bench.cores_for(bench.threads), bench.budget.size
    builds = {kind: functools.partial(bench_cases.train, name, kind, cores, size) for kind in kinds}
    bench.progress.now(f"building {counted(len(kinds), 'model')}")
    with bench.started(builds) as sides:
        round_seconds = 0.0
        for kind, side in sides.items():
            # Stoker chooses an engine for each new shape of a product; stock has nothing to choose.
            steps = bench_cases.BATCHES if kind.startswith("stoker") else 2
            for number in range(steps):
                bench.progress.now(f"warming up: {kind}, step {number + 1}")
                taken = side.take(number, _LONGEST_STEP)
                if kind.startswith("stock") and taken.seconds > 5.0:
                    break
            round_seconds += taken.seconds
        measured = {kind: Measured() for kind in kinds}
        for pair, (stock, stoker) in group:
            pair.stock, pair.stoker = measured[stock], measured[stoker]
        rounds = _clamp(seconds / max(round_seconds, 1e-3), bench.budget.rounds)
        begin = time.monotonic()
        with bench.watched(*(pair for pair, _ in group)):
            for number in range(rounds):
                spent = time.monotonic() - begin
                if spent > (seconds if number >= bench.budget.rounds[0] else _AT_MOST * seconds):
                    break
                for kind, side in sides.items():
                    bench.progress.now(f"round {number + 1} of {rounds}: {kind}")
                    measured[kind].add(side.take(number, _LONGEST_STEP))


def _clamp(value: float, bounds: tuple[int, int]) -> int:
    return max(bounds[0], min(bounds[1], int(value)))


# Host time


def _host(bench: Bench) -> str:
    names = [name if bench_cases.has_peft() or name != "llama-lora" else "llama" for name in HOST_CASES]
    seconds = bench.budget.seconds["host"] / len(names)
    for name in names:
        build = functools.partial(bench_cases.host_turn, name, bench.bf16_units, bench.budget.size)
        found = HostTime(narrow.CASES[name][0].replace(" on all linear layers", ""))
        bench.progress.now(found.title)
        with bench.started({"host": build}) as sides:
            side = sides["host"]
            for number in range(3):
                side.take(number, _LONGEST_STEP)
            end = time.monotonic() + seconds
            try:
                with bench.watched(found):
                    while len(found.seconds.get("stock", ())) < 5 or time.monotonic() < end:
                        for kind, value in side.take(0, _LONGEST_STEP).value.items():
                            found.seconds.setdefault(kind, []).append(value)
            finally:
                bench.results.host += [found] if found.seconds else []
    return ", ".join(f"{one.share():.2f}x of stock's" for one in bench.results.host)


# 1 to all threads


def thread_counts(most: int, quick: bool) -> list[int]:
    """All threads first, because what a machine can do with one may take too long."""
    if quick:
        return sorted({1, most}, reverse=True)
    return sorted({most, *(1 << bit for bit in range(most.bit_length()) if 1 << bit <= most)}, reverse=True)


def _sweep(bench: Bench) -> str:
    counts = thread_counts(bench.threads, bench.budget.size != "full")
    if len(counts) == 1:
        bench.note("Only one thread can be used, so there is nothing to compare with it.")
        return "left out"
    case, size = CASES["bert-qa"], bench.budget.size
    kinds: tuple[Kind, Kind] = ("stock", "stoker")
    free = bench.free_memory()
    need = sum(case.need(kind, size) for kind in kinds)
    if free is not None and need > _SHARE * free:
        bench.note(
            f"1 to all threads are left out: they need about {need / 1e9:.0f} GB of memory, and {free / 1e9:.1f} GB are free."
        )
        return "left out"
    start = bench.cores_for(counts[0])
    builds = {kind: functools.partial(bench_cases.sweep_step, kind, start, size) for kind in kinds}
    total = bench.budget.seconds["threads"]
    end = time.monotonic() + total
    pair: Pair | None = None
    bench.progress.now("building 2 models")
    with bench.started(builds) as sides:
        for place, threads in enumerate(counts):
            if pair is not None:
                slower = pair.threads / threads
                cost = slower * (pair.stock.median * 2 + pair.stoker.median * (bench_cases.BATCHES + 1))
                if cost > max(end - time.monotonic(), total):
                    left = ", ".join(str(count) for count in reversed(counts[place:]))
                    bench.note(
                        f"Left out of {counts[0]} threads: {left}. A measurement would take {duration(cost)} or more."
                    )
                    break
            pair = Pair("threads", case.title, "fp32", "stock", threads, case.shown_layers(size))
            bench.results.sweep.append(pair)
            each = max(end - time.monotonic(), 0.0) / 2 if place + 1 < len(counts) else end - time.monotonic()
            _count(bench, pair, sides, each)
    done = bench.results.measured_sweep
    if len(done) < 2:
        return f"{counted(counts[0], 'thread')} only"
    return f"Stoker {done[0].stoker.median / done[-1].stoker.median:.1f}x from {done[0].threads} to {done[-1].threads} threads"


def _count(bench: Bench, pair: Pair, sides: Mapping[Kind, Side], seconds: float) -> None:
    cores = bench.cores_for(pair.threads)
    steps: dict[Kind, int] = {"stock": 1, "stoker": bench_cases.BATCHES}
    for kind, side in sides.items():
        for number in range(steps[kind]):
            bench.progress.now(f"{counted(pair.threads, 'thread')}, warming up: {kind}")
            side.take((number, cores), _LONGEST_STEP)
    end = time.monotonic() + seconds
    with bench.watched(pair):
        for number in range(bench.budget.sweep_rounds[1]):
            if number >= bench.budget.sweep_rounds[0] and time.monotonic() > end:
                break
            for kind, side in sides.items():
                bench.progress.now(f"{counted(pair.threads, 'thread')}, round {number + 1}: {kind}")
                getattr(pair, kind).add(side.take((number, cores), _LONGEST_STEP))


# Allreduce


def rank_cores(machine: Machine) -> list[tuple[int, ...]]:
    """The CPUs of each rank: one rank per NUMA node, or two on a single one."""
    nodes: dict[int, list[int]] = {}
    for core in machine.fast_cores:
        nodes.setdefault(core.node, []).extend(core.cpus)
    if len(nodes) > 1:
        return [tuple(cpus) for _, cpus in sorted(nodes.items())]
    cpus = [core.cpus[0] for core in machine.fast_cores]
    half = len(cpus) // 2
    return [tuple(cpus[:half]), tuple(cpus[half : 2 * half])] if half else []


def _allreduce(bench: Bench) -> str:
    shares = rank_cores(bench.machine)
    if not shares or bench.threads < 2:
        bench.note("Allreduce is left out: two ranks need two cores.")
        return "left out"
    many = len(shares) > 2 or len({core.node for core in bench.machine.fast_cores}) > 1
    placement = "one per NUMA node" if many else "on one NUMA node"
    port = free_port("127.0.0.1")
    builds = {
        str(rank): functools.partial(collectives.rank_step, rank, len(shares), port, cpus if bench.cores else ())
        for rank, cpus in enumerate(shares)
    }
    bench.progress.now("building the ccl backend, if it is not yet there")
    large = bench.budget.megabytes * 1_000_000 if bench.budget.size != "tiny" else 100_000
    with bench.started(builds) as sides:
        for nbytes in (large, 4096):
            bench.progress.now(f"{nbytes:,} bytes")
            once = sum(_together(sides, (nbytes, 1)).values())
            repeats = _clamp(bench.budget.seconds["allreduce"] / 3 / max(once, 1e-6), (3, 300))
            end = load.others_during(bench.own_seconds, bench.machine.usable_cpus or None)
            seconds = _together(sides, (nbytes, repeats))
            bench.results.allreduce.append(
                Allreduce(len(shares), placement, nbytes, seconds, repeats, Disturbance.of(end()))
            )
    return ", ".join(f"{one.faster:.1f}x as fast as gloo" for one in bench.results.allreduce)


def _together(sides: Mapping[str, Side], asked: tuple[int, int]) -> dict[str, float]:
    """The answer of the first of all ranks. When one fails, the others would wait for it: then all are ended."""
    for side in sides.values():
        side.begin(asked)
    answers: list[Taken] = [side.end(_LONGEST_START) for side in sides.values()]
    found: dict[str, float] = answers[0].value
    if not all(math.isfinite(value) and value > 0 for value in found.values()):
        raise SideFailed("a time could not be measured")
    return found
