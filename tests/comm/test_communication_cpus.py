"""Threads that communicate run on the CPUs that the launcher has kept for them, beside the arithmetic and not on its cores."""

from __future__ import annotations

import os
import sys
import textwrap

import pytest

from rig import warm

CPUS = sorted(os.sched_getaffinity(0))

PROGRAM = textwrap.dedent("""
    import os, pathlib, re, sys, time
    import torch, torch.distributed as dist
    from stoker.comm.registration import register
    register()
    dist.init_process_group("ccl", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    dist.all_reduce(torch.ones(3), async_op=True).wait()  # by the group's own thread
    wanted, until = sys.argv[1], time.monotonic() + float(sys.argv[2])
    masks = []
    while wanted not in masks and time.monotonic() < until:  # the caller may have been faster than the thread
        tasks = pathlib.Path("/proc/self/task").iterdir()
        masks = [re.search(r"Cpus_allowed_list:\\s*(\\S+)", (task / "status").read_text())[1] for task in tasks]
    print("masks", *masks)
    print("main", *sorted(os.sched_getaffinity(0)))
""")


@pytest.mark.skipif(len(CPUS) < 2, reason="needs two CPUs")
@pytest.mark.parametrize(
    ("given", "moves"), [("{0}-{0},{0}", True), ("", False), ("{0}-", False)]
)  # fmt: skip
def test_the_groups_thread_moves_to_the_communication_cpus(given: str, moves: bool) -> None:
    last = CPUS[-1]
    result = warm.run(
        [sys.executable, "-c", PROGRAM, str(last), "30" if moves else "0.5"],
        env={**os.environ, "STOKER_CCL_CPUS": given.format(last), "STOKER_CCL_BACKEND": "compiled"},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    lines = dict(line.partition(" ")[::2] for line in result.stdout.splitlines())
    assert lines["main"] == " ".join(map(str, CPUS)), result.stderr  # arithmetic stays where it was
    assert (str(last) in lines["masks"].split()) is moves
