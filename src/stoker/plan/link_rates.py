"""Measures the inputs of the plan on this machine: the step of one node, and the cost of collectives between nodes.

Each measurement runs in its own processes and is cached by machine, versions of Stoker and torch, and its parameters.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from stoker import __version__
from stoker.english import counted
from stoker.errors import UserError
from stoker.machine import cache_directory, this_machine
from stoker.plan.cost_model import PARTS, Collectives, Node
from stoker.plan.subject import Subject

__all__ = ["candidates", "measure_collectives", "measure_node", "usable_cores"]

_FORMAT = 5
_LONGEST = 900  # seconds
Progress = Callable[[str], None]


def _quiet(line: str) -> None:
    pass


def measure_collectives(*, fresh: bool = True, progress: Progress = _quiet) -> Collectives:
    """Measured between two processes over the loopback interface, one core each."""

    def measure() -> dict[str, float]:
        progress("measuring collectives (a few seconds)")
        cpus = sorted(os.sched_getaffinity(0))
        shares = [[cpus[rank % len(cpus)]] for rank in range(2)]
        return _run("collectives", shares, "gloo", megabytes=100, rounds=5)[0]

    found = _cached("collectives", {}, measure, fresh)
    return Collectives(
        1 / found["fp32"], 1 / found["bf16"], found["fp32_cpu"], found["bf16_cpu"], found["apply"], found["cast"]
    )


def candidates(cores: int) -> list[int]:
    """Numbers of processes per node worth trying."""
    return sorted({1, *(n for n in (2, 4, 8, 16) if n <= cores and (cores // n <= 32) and cores % n == 0)} - {0})[:4]


def measure_node(
    subject: Subject,
    batch: int,
    processes: int,
    collectives: Collectives,
    *,
    fresh: bool = False,
    progress: Progress = _quiet,
) -> Node:
    """The step of this machine with `batch` rows in `processes` processes."""
    cpus = usable_cores()
    each = len(cpus) // processes
    conditions = {"subject": subject.identity, "batch": batch, "processes": processes, "cpus": len(cpus)}

    def measure() -> dict[str, float]:
        progress(f"measuring a step of {subject.model}, {batch} rows, {counted(processes, 'process')}")
        if processes > 1 and not _compiled():
            progress("compiling the ccl backend first (once, about a minute)")
        shares = [cpus[rank * each : (rank + 1) * each] for rank in range(processes)]
        found = _run("step", shares, "ccl", subject=asdict(subject), batch=batch, rounds=3)
        together = {name: sum(one[name] for one in found) for name in ("tokens", "memory")}
        return {**found[0], "step": max(one["step"] for one in found), **together}

    found = _cached("step", conditions, measure, fresh)
    return Node(
        step=found["step"], processes=processes, parameters=int(found["parameters"]),
        backward=min(found["backward"] / found["step"], 1.0), ready=tuple(found[f"ready{part}"] for part in range(PARTS)),
        collectives=collectives, cores=len(cpus), tokens=found["tokens"], memory=found["memory"],
    )  # fmt: skip


def _compiled() -> bool:
    """Whether a compiled ccl backend is in the cache, for any torch: checking the version would import torch."""
    try:
        return any(cache_directory.trusted_directory().glob("stoker_ccl-*.so"))
    except OSError:
        return False


def usable_cores() -> list[int]:
    """One CPU of each physical core that this process may use."""
    allowed = os.sched_getaffinity(0)
    found = [core.cpus[0] for core in this_machine().usable_cores if core.cpus]
    return [cpu for cpu in found if cpu in allowed] or sorted(allowed)


def _cached(
    name: str, conditions: dict[str, Any], measure: Callable[[], dict[str, float]], fresh: bool
) -> dict[str, float]:
    from importlib import metadata

    key = json.dumps(
        [conditions, __version__, metadata.version("torch"), this_machine().fingerprint, _FORMAT], sort_keys=True
    )
    file = f"plan-{name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
    kept = None if fresh else cache_directory.load(file)
    if kept is not None and all(isinstance(value, int | float) and value >= 0 for value in kept.values()):
        return {str(k): float(v) for k, v in kept.items()}
    found = measure()
    with contextlib.suppress(OSError):  # it is then measured again next time
        cache_directory.save(file, found)
    return found


def _run(what: str, shares: list[list[int]], backend: str, **more: Any) -> list[dict[str, float]]:
    with tempfile.TemporaryDirectory(prefix="stoker-plan-") as directory:  # which other users cannot enter
        request = {"what": what, "size": len(shares), "store": f"{directory}/store", "backend": backend, **more}
        return _run_all([{**request, "rank": rank, "cpus": cpus} for rank, cpus in enumerate(shares)])


def _run_all(requests: list[dict[str, Any]]) -> list[dict[str, float]]:
    processes = []
    for request in requests:
        command = [sys.executable, "-m", "stoker.plan.probe", json.dumps(request)]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    try:
        ends = [process.communicate(timeout=_LONGEST) for process in processes]
    except subprocess.TimeoutExpired:
        raise UserError(
            f"the measurement took more than {_LONGEST // 60} minutes; try a smaller --model or --batch"
        ) from None
    finally:
        for process in processes:
            process.kill()
    for process, (_, stderr) in zip(processes, ends, strict=True):
        if process.returncode:
            raise UserError(_failure_reason(process.returncode, stderr))
    return [json.loads(out.strip().splitlines()[-1]) for out, _ in ends]


def _failure_reason(code: int, stderr: str) -> str:
    if code == -signal.SIGKILL:
        return "the measurement was killed, most likely because memory ran out; try a smaller --model or --batch"
    last = (stderr.strip().splitlines() or [f"exit code {code} without a message"])[-1]
    mistake = last.partition("stoker.errors.UserError: ")[2]
    return mistake or f"the measurement failed: {last[:300]}"
