"""Examines the architectures of the installed transformers: `python tests/zoo/run.py [--only bert,llama] [--jobs 2]`.

Each folder of transformers.models is examined in a forked process with a time limit. Results are written to --out as JSON; the
exit code is 1 if a case failed. `--page` writes docs/models.md from the results of all folders.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import multiprocessing.connection
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    os.environ["OMP_NUM_THREADS"] = "1"  # processes are parallel instead; forked ones could not use a pool of threads

from zoo import page

LIMIT = 120
"""Seconds for one folder; the slowest takes a third of it on a busy machine."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", help="folders of transformers.models, separated by commas")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds for one folder")
    parser.add_argument("--out", default="build/zoo.json", help="where the results are written")
    parser.add_argument("--page", action="store_true", help="write docs/models.md from the results")
    parser.add_argument("--from", dest="results", help="take the results of an earlier run from this file")
    parser.add_argument("--verbose", action="store_true", help="print every case, not only failures")
    given = parser.parse_args()

    from zoo.species import folders

    known = list(folders())
    chosen = given.only.split(",") if given.only else known
    if unknown := sorted(set(chosen) - set(known)):
        print(f"run.py: transformers has no folder {', '.join(unknown)}", file=sys.stderr)
        return 2
    if given.page and given.only:
        print("run.py: --page needs the results of all folders; leave --only out", file=sys.stderr)
        return 2
    begin = time.monotonic()
    if given.results:
        cases = json.loads(Path(given.results).read_text())
    else:
        cases = []
        for found in _examined(chosen, given):
            cases += found
            _write(Path(given.out), cases)  # every time: a run that is stopped leaves what it has
        print(f"{len(chosen)} folders, {len(cases)} cases in {time.monotonic() - begin:.0f} s; {given.out}")
    for outcome, count in Counter(case["outcome"] for case in cases).most_common():
        among = len({case["folder"] for case in cases if case["outcome"] == outcome})
        print(f"  {outcome:<14}{count:>5} cases in {among} folders")
    if given.page:
        import transformers

        page.write(cases, transformers.__version__)
    outdated = [] if given.only else page.differences(cases)
    for line in outdated:
        print(f"docs/models.md is outdated: {line}")
    return int(any(map(is_failure, cases)) or bool(outdated))


def _examined(names: list[str], given: argparse.Namespace) -> Iterator[list[dict[str, Any]]]:
    for cases in examine_all(names, given.jobs, given.limit):
        for case in cases:
            if given.verbose or given.only or is_failure(case):
                print(describe(case), flush=True)
        yield cases


def _write(path: Path, cases: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    ordered = sorted(cases, key=lambda case: (case["folder"], case["name"]))
    path.write_text(json.dumps(ordered, indent=1) + "\n")


def is_failure(case: dict[str, Any]) -> bool:
    return case["outcome"] in page.FAILED


def describe(case: dict[str, Any]) -> str:
    lines = [f"{case['folder']}: {case['name']}: {case['outcome']}; {case['why']}"]
    if len(case["calls"]) > 1:
        lines += [f"    {name}: {what}" for name, what in case["calls"].items()]
    lines += [f"    {name}: {what}" for name, what in case["rerouted"].items()]
    return "\n".join(lines)


@dataclass
class _Job:
    """A process that examines a folder."""

    folder: str
    process: Any
    end: float
    """When it has to be finished, on the monotonic clock."""
    cases: list[dict[str, Any]] = field(default_factory=list)
    now: str = ""
    """The class that it examines."""


def examine_all(names: list[str], jobs: int, limit: float) -> Iterator[list[dict[str, Any]]]:
    """The cases of each folder, in the order in which they are finished."""
    import zoo.examine  # once, before processes are forked  # noqa: F401

    context = multiprocessing.get_context("fork")
    left = list(reversed(names))
    running: dict[Any, _Job] = {}
    while left or running:
        while left and len(running) < jobs:
            name = left.pop()
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_examine, args=(name, sender))
            process.start()
            sender.close()
            running[receiver] = _Job(name, process, time.monotonic() + limit)
        soonest = min(job.end for job in running.values())
        ready = multiprocessing.connection.wait(list(running), timeout=max(0.0, soonest - time.monotonic()))
        for receiver, job in list(running.items()):
            late = time.monotonic() >= job.end
            if not late and (receiver not in ready or _receive(receiver, job)):
                continue
            if late:
                job.process.kill()
            job.process.join()
            if late or job.process.exitcode:
                why = f"took more than {limit:.0f} s" if late else f"ended with exit code {job.process.exitcode}"
                job.cases.append(_lost(job, why))
            receiver.close()
            del running[receiver]
            yield job.cases


def _receive(receiver: Any, job: _Job) -> bool:
    """Whether the process had something to say; False at its end."""
    try:
        message = json.loads(receiver.recv_bytes())
    except EOFError:
        return False
    if isinstance(message, str):
        job.now = message
    else:
        job.cases.append(message)
    return True


def _lost(job: _Job, why: str) -> dict[str, Any]:
    from zoo.examine import Case

    return dataclasses.asdict(Case(job.folder, job.now, "crash", f"the process {why}"))


def _examine(folder: str, sender: Any) -> None:
    import torch

    from zoo.examine import examine_class
    from zoo.species import classes_of

    torch.set_num_threads(1)
    for config, model in classes_of(folder):
        sender.send_bytes(json.dumps(model.__name__).encode())
        sender.send_bytes(json.dumps(dataclasses.asdict(examine_class(folder, config, model))).encode())


if __name__ == "__main__":
    sys.exit(main())
