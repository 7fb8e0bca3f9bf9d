"""PyTorch's own tests of torch.distributed, run on gloo and on ccl: what gloo passes, ccl must pass.

The tests are those of the installed wheel (torch/testing/_internal/distributed), or a file of PyTorch's repository that the wheel
does not have. Their text is read when this runs. Conditions on gloo's name are opened to ccl; where tests or their helpers name
gloo themselves, ccl takes its place.

    python tests/comm/certify.py                         # 2 ranks, gloo and ccl side by side
    python tests/comm/certify.py --ranks 4 --select ddp  # 4 ranks, tests whose name contains "ddp"
    python tests/comm/certify.py --file ../pytorch/test/distributed/test_c10d_gloo.py    # with the ranks that the file sets
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import importlib.machinery
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
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

PACKAGE = "torch.testing._internal.distributed"

EXCEPTIONS = {
    "test_monitored_barrier.*": "torch.distributed.monitored_barrier refuses every backend but gloo; the method of a group works",
    "test_ddp_logging_data_cpu": "torch's logs call every backend of a plugin 'custom'",
    "test_(allgather|alltoall)_checks|test_all_to_all_single": "ccl takes sizes that differ between ranks, and any strides",
    "test_allreduce_(op|overall)_timeout": "they expect gloo's words; ccl names the operation and the missing ranks",
    "test_(set_gloo|gloo_set)_pg_timeout.*": "the attribute `options` and _set_pg_timeout are for gloo's and nccl's classes only",
}
"""Tests (patterns of their names) that gloo passes and ccl does not have to, with the reason."""

EVERY_TIME = r"\.(?!test_monitored_barrier)"
"""Which tests run with the others; the rest waits for timeouts, for exceptions at that."""

Outcomes = dict[str, tuple[str, str]]
"""Test -> "passed", "failed" or "skipped", and why."""


Tests = dict[str, tuple[type[unittest.TestCase], str]]
"""Name -> the class and its method."""


def opened_to_ccl(text: str) -> str:
    """The text of the tests, with conditions on gloo's name extended to ccl."""
    text = re.sub(r'BACKEND != "gloo"', 'BACKEND not in {"gloo", "ccl"}', text)
    text = re.sub(r'BACKEND == "gloo"', 'BACKEND in {"gloo", "ccl"}', text)
    return re.sub(r'require_backend_is_available\(\{"gloo"\}\)', 'require_backend_is_available({"gloo", "ccl"})', text)


def moved_to_ccl(text: str) -> str:
    """The text of tests that name gloo themselves, with ccl in its place."""
    text = re.sub(r'"((?:cpu:)?)gloo\b', r'"\1ccl', text)
    text = text.replace("dist.Backend.GLOO", '"ccl"')
    text = re.sub(r"^ *backend\.create_device\(.*\n", "", text, flags=re.MULTILINE)  # a network device of gloo
    return re.sub(r"\bc10d\.ProcessGroupGloo\(", "c10d.new_ccl_group(", text)


class RewritingLoader(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, path: str, rewrite: Callable[[str], str]) -> None:
        super().__init__(name, path)
        self._rewrite = rewrite

    def get_code(self, fullname: str) -> types.CodeType:
        path = self.get_filename(fullname)
        return compile(self._rewrite(Path(path).read_text()), path, "exec", dont_inherit=True)


class Rewriting(importlib.machinery.PathFinder):
    """Imports modules with a text of ours: the first of `rules` (pattern of a name, function) that fits."""

    rules: ClassVar[list[tuple[str, Callable[[str], str]]]] = []

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        rewrite = next((rewrite for pattern, rewrite in cls.rules if re.fullmatch(pattern, fullname)), None)
        spec = super().find_spec(fullname, path, target) if rewrite else None
        if spec and rewrite and spec.origin:
            spec.loader = RewritingLoader(fullname, spec.origin, rewrite)
        return spec


def new_ccl_group(store: Any, rank: int, size: int, options: Any) -> Any:
    """Stands for the constructor of ProcessGroupGloo: the backend itself, of torch's default group or of another."""
    import torch
    import torch.distributed as dist

    timeout = options._timeout if isinstance(options._timeout, timedelta) else timedelta(seconds=options._timeout)
    if not dist.is_initialized():
        dist.init_process_group("ccl", store=store, rank=rank, world_size=size, timeout=timeout)
        group: Any = dist.group.WORLD
    else:
        group = dist.new_group(backend="ccl", timeout=timeout)
    return group._get_backend(torch.device("cpu"))


def prepare(backend: str, file: Path | None) -> None:
    """What the tests import is rewritten; ranks are forked, because a process that imports torch anew takes seconds."""
    Rewriting.rules.append((re.escape(f"{PACKAGE}.distributed_test"), opened_to_ccl))
    if backend == "ccl":
        Rewriting.rules.append((r"torch\.testing\._internal\.(common_|distributed\.).*", moved_to_ccl))
    if file:
        sys.path.insert(0, str(file.parent))
        if backend == "ccl":
            Rewriting.rules += [(re.escape(one.stem), moved_to_ccl) for one in file.parent.glob("*.py")]
    sys.meta_path.insert(0, Rewriting)
    # torch's test helpers import expecttest, which compares with stored texts; few tests store any.
    if importlib.util.find_spec("expecttest") is None:
        sys.modules["expecttest"] = types.SimpleNamespace(TestCase=unittest.TestCase)  # type: ignore[assignment]

    import torch
    from torch.testing._internal import common_distributed

    if backend == "ccl":
        torch.distributed.new_ccl_group = new_ccl_group  # type: ignore[attr-defined]
        torch.distributed.Backend.default_device_backend_map["cpu"] = "ccl"
    torch.multiprocessing.set_start_method("fork")

    def fork(test: Any) -> None:
        test._start_processes(torch.multiprocessing.get_context("fork").Process)

    common_distributed.MultiProcessTestCase._spawn_processes = fork  # type: ignore[method-assign]


def tests_of(classes: Iterable[type[unittest.TestCase]]) -> Tests:
    return {
        f"{one.__name__}.{method}": (one, method)
        for one in classes
        for method in unittest.defaultTestLoader.getTestCaseNames(one)
    }


def tests_of_collectives() -> Tests:
    from torch.testing._internal import common_distributed

    features = common_distributed.DistTestCases.backend_feature
    for feature in ("ddp", "gpu", "subgroup", "plugin"):  # "gpu" also stands for backends with object collectives
        features[feature].add("ccl")
    module: Any = importlib.import_module(f"{PACKAGE}.distributed_test")
    for backends in (module.PROFILING_SUPPORTED_BACKENDS, module.SEND_RECV_PROFILING_SUPPORTED_BACKENDS):
        backends.append("ccl")

    class Collectives(module.TestDistBackend, module.DistributedTest._DistTestBase):  # type: ignore[misc, name-defined]
        def setUp(self) -> None:
            super().setUp()
            module.INIT_METHOD = os.environ["INIT_METHOD"]
            self._spawn_processes()

    return tests_of([Collectives])


def tests_of_autograd() -> Tests:
    """DDP beside RPC and distributed autograd, with the ranks that the tests set."""
    utilities: Any = importlib.import_module(f"{PACKAGE}.rpc_utils")
    fixture: Any = importlib.import_module(f"{PACKAGE}.rpc.tensorpipe_rpc_agent_test_fixture")
    suites = [utilities.DdpUnderDistAutogradTest, utilities.DdpComparisonTest]
    return tests_of(utilities.generate_tests("", fixture.TensorPipeRpcAgentTestFixture, suites, __name__).values())


def tests_of_file(path: Path) -> Tests:
    module = importlib.import_module(path.stem)
    found = [one for one in vars(module).values() if isinstance(one, type) and issubclass(one, unittest.TestCase)]
    return tests_of(one for one in found if one.__module__ == path.stem)


def work(backend: str, file: Path | None) -> None:
    """Runs the tests named on stdin, one by one, and answers with a line of JSON for each; first with the names of all tests."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # the tests print
    import torch

    from stoker.comm.registration import register

    register()
    if backend == "ccl":
        from stoker.comm.compiled import load

        load()  # the ranks inherit it
    prepare(backend, file)
    tests = tests_of_file(file) if file else tests_of_collectives() | tests_of_autograd()
    for one in {test for test, _ in tests.values()}:
        one.setUpClass()
    print(json.dumps(list(tests)), file=answers)
    for line in sys.stdin:
        result = unittest.TestResult()
        start = time.monotonic()
        test, method = tests[line.strip()]
        test(method).run(result)
        if torch.distributed.is_initialized():  # tests without ranks of their own may leave a group
            torch.distributed.destroy_process_group()
        problems = result.failures + result.errors
        outcome = "failed" if problems else "skipped" if result.skipped else "passed"
        why = problems[0][1] if problems else result.skipped[0][1] if result.skipped else ""
        print(json.dumps([outcome, why, time.monotonic() - start]), file=answers)


class Worker:
    """A process that runs one test at a time on `backend`, each with `ranks` new ranks."""

    def __init__(self, backend: str, ranks: int, file: Path | None) -> None:
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
            [sys.executable, __file__, "--worker", backend, *(["--file", str(file)] if file else [])],
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


def run(backend: str, ranks: int, jobs: int, select: str, file: Path | None = None, verbose: bool = False) -> Outcomes:
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
        workers = list(pool.map(lambda _: Worker(backend, ranks, file), range(jobs)))
        for name in workers[0].names:
            if re.search(select, name):
                names.put(name)
        for done in [pool.submit(drain, worker) for worker in workers]:
            done.result()
        for worker in workers:
            worker.close()
    return outcomes


def excepted(name: str) -> bool:
    return any(re.fullmatch(pattern, name.rpartition(".")[2]) for pattern in EXCEPTIONS)


def failures(gloo: Outcomes, ccl: Outcomes) -> dict[str, str]:
    """What ccl fails, or skips, although gloo passes it and EXCEPTIONS does not list it; with the reason."""
    return {
        name: ccl[name][1]
        for name, (outcome, _) in gloo.items()
        if outcome == "passed" and ccl[name][0] != "passed" and not excepted(name)
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=2, help="tests at the same time, on each backend")
    parser.add_argument("--select", default="", help="a regular expression that the name of a test contains")
    parser.add_argument(
        "--file", type=lambda text: Path(text).resolve(), help="tests of PyTorch's repository, not of the wheel"
    )
    parser.add_argument("--worker", choices=["gloo", "ccl"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker, options.file)
        return 0
    found = {
        backend: run(backend, options.ranks, options.jobs, options.select, options.file, verbose=True)
        for backend in ("gloo", "ccl")
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
