"""PyTorch's own tests of torch.distributed, run on gloo and on ccl: what gloo passes, ccl must pass.

The tests are those of the installed wheel (torch/testing/_internal/distributed/distributed_test.py). Many are reserved for gloo
by name; the text is read when this runs, and those conditions are opened to ccl too.

    python tests/comm/certify.py                         # 2 ranks, gloo and ccl side by side
    python tests/comm/certify.py --ranks 4 --select ddp  # 4 ranks, tests whose name contains "ddp"
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import importlib.util
import json
import os
import queue
import re
import subprocess
import sys
import time
import types
import unittest
from collections import Counter
from pathlib import Path
from typing import Any

MODULE = "torch.testing._internal.distributed.distributed_test"

EXCEPTIONS = {
    "test_monitored_barrier.*": "torch.distributed.monitored_barrier refuses every backend but gloo; the method of a group works",
    "test_ddp_logging_data_cpu": "torch's logs call every backend of a plugin 'custom'",
}
"""Tests (patterns of their names) that gloo passes and ccl does not have to, with the reason."""

EVERY_TIME = "^(?!test_monitored_barrier)"
"""Which tests run with the others; the rest waits for timeouts, for exceptions at that."""

Outcomes = dict[str, tuple[str, str]]
"""Test -> "passed", "failed" or "skipped", and why."""


def opened_to_ccl(text: str) -> str:
    """The text of the tests, with conditions on gloo's name extended to ccl."""
    text = re.sub(r'BACKEND != "gloo"', 'BACKEND not in {"gloo", "ccl"}', text)
    text = re.sub(r'BACKEND == "gloo"', 'BACKEND in {"gloo", "ccl"}', text)
    return re.sub(r'require_backend_is_available\(\{"gloo"\}\)', 'require_backend_is_available({"gloo", "ccl"})', text)


def load_tests() -> type[unittest.TestCase]:
    # torch's test helpers import expecttest, which compares with stored texts; these tests store none.
    sys.modules.setdefault("expecttest", types.SimpleNamespace(TestCase=unittest.TestCase))  # type: ignore[arg-type]
    from torch.testing._internal import common_distributed

    spec = importlib.util.find_spec(MODULE)
    assert spec is not None
    assert spec.origin is not None
    features = common_distributed.DistTestCases.backend_feature
    for feature in ("ddp", "gpu", "subgroup", "plugin"):  # "gpu" also stands for backends with object collectives
        features[feature].add("ccl")
    module: Any = types.ModuleType(MODULE)
    module.__file__ = spec.origin
    sys.modules[MODULE] = module
    code = compile(opened_to_ccl(Path(spec.origin).read_text()), spec.origin, "exec", dont_inherit=True)
    exec(code, module.__dict__)
    for backends in (module.PROFILING_SUPPORTED_BACKENDS, module.SEND_RECV_PROFILING_SUPPORTED_BACKENDS):
        backends.append("ccl")

    class Tests(module.TestDistBackend, module.DistributedTest._DistTestBase):  # type: ignore[misc, name-defined]
        def setUp(self) -> None:
            super().setUp()
            # Forked and not spawned: a process that imports torch and this module anew takes seconds.
            import torch

            module.INIT_METHOD = os.environ["INIT_METHOD"]
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    return Tests


def work(backend: str) -> None:
    """Runs the tests named on stdin, one by one, and answers with a line of JSON for each; first with the names of all tests."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # the tests print
    from stoker.comm.registration import register

    register()
    if backend == "ccl":
        from stoker.comm.compiled import load

        load()  # the ranks inherit it
    tests = load_tests()
    tests.setUpClass()
    print(json.dumps(unittest.defaultTestLoader.getTestCaseNames(tests)), file=answers)
    for line in sys.stdin:
        result = unittest.TestResult()
        start = time.monotonic()
        tests(line.strip()).run(result)
        problems = result.failures + result.errors
        outcome = "failed" if problems else "skipped" if result.skipped else "passed"
        why = problems[0][1] if problems else result.skipped[0][1] if result.skipped else ""
        print(json.dumps([outcome, why, time.monotonic() - start]), file=answers)


class Worker:
    """A process that runs one test at a time on `backend`, each with `ranks` new ranks."""

    def __init__(self, backend: str, ranks: int) -> None:
        environment = {
            **os.environ,
            "BACKEND": backend,
            "WORLD_SIZE": str(ranks),
            "INIT_METHOD": "file://",  # each test gets a file of its own
            "STOKER_CCL_BACKEND": "compiled",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--worker", backend],
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        self.names: list[str] = self._answer()

    def run(self, name: str) -> tuple[str, str, float]:
        assert self.process.stdin is not None
        print(name, file=self.process.stdin, flush=True)
        outcome, why, seconds = self._answer()
        return outcome, why, seconds

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def run(backend: str, ranks: int, jobs: int, select: str, verbose: bool = False) -> Outcomes:
    """The outcomes of all tests whose name matches `select`, on `backend`; `jobs` tests run at the same time."""
    names: queue.Queue[str] = queue.Queue()
    outcomes: Outcomes = {}

    def drain(worker: Worker) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                name = names.get_nowait()
                outcome, why, seconds = worker.run(name)
                outcomes[name] = (outcome, why)
                if verbose and outcome != "skipped":
                    print(f"{backend} {outcome} {seconds:5.1f} s  {name}", flush=True)

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        workers = list(pool.map(lambda _: Worker(backend, ranks), range(jobs)))
        for name in workers[0].names:
            if re.search(select, name):
                names.put(name)
        for done in [pool.submit(drain, worker) for worker in workers]:
            done.result()
        for worker in workers:
            worker.close()
    return outcomes


def failures(gloo: Outcomes, ccl: Outcomes) -> dict[str, str]:
    """What ccl fails, or skips, although gloo passes it and EXCEPTIONS does not list it; with the reason."""
    return {
        name: ccl[name][1]
        for name, (outcome, _) in gloo.items()
        if outcome == "passed" and ccl[name][0] != "passed" and not any(re.fullmatch(one, name) for one in EXCEPTIONS)
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=2, help="tests at the same time, on each backend")
    parser.add_argument("--select", default="", help="a regular expression that the name of a test contains")
    parser.add_argument("--worker", choices=["gloo", "ccl"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker)
        return 0
    found = {
        backend: run(backend, options.ranks, options.jobs, options.select, verbose=True) for backend in ("gloo", "ccl")
    }
    missing = failures(found["gloo"], found["ccl"])
    for name, why in missing.items():
        print(f"\n{name}\n{why}")
    for backend, outcomes in found.items():
        print(backend, dict(Counter(outcome for outcome, _ in outcomes.values())))
    print(f"{len(missing)} tests pass on gloo and not on ccl; {len(EXCEPTIONS)} exceptions are listed")
    return int(bool(missing))


if __name__ == "__main__":
    raise SystemExit(main())
