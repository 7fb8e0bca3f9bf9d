"""A rank whose gloo threads are busy when it ends exits with 0 instead of aborting."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

from comm.ranks import free_port

PROGRAM = textwrap.dedent("""
    import threading, time
    import torch
    import torch.distributed as dist
    if {waits}:
        from stoker.comm.gloo_exit import wait_at_exit
        wait_at_exit()

    dist.init_process_group("gloo")
    kept = dist.group.WORLD  # as DistributedDataParallel does: destroying the group does not join its threads
    began = threading.Event()

    def busy(_):
        began.set()
        end = time.monotonic() + 1
        while time.monotonic() < end:
            pass

    dist.all_reduce(torch.ones(4), async_op=True).get_future().then(busy)
    began.wait()
    dist.destroy_process_group()
    print("done", flush=True)
""")


def run(waits: bool) -> subprocess.CompletedProcess[str]:
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "RANK": "0", "WORLD_SIZE": "1"}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM.format(waits=waits)],
        env={**os.environ, **place, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def test_gloo_threads_finish_before_python_ends() -> None:
    done = run(waits=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def test_torch_still_aborts_without_it() -> None:
    """Fails once torch has mended this: then stoker/comm/gloo_exit.py can go."""
    assert "terminate called without an active exception" in run(waits=False).stderr
