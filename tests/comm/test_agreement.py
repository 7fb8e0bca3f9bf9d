"""Ranks that cannot work together say so at the start, all of them, with both sides named; and a broken Stoker breaks nothing."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from stoker.comm import paths


def test_other_versions_on_one_host_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = threading.local()
    monkeypatch.setattr(paths, "_version", lambda: versions.value)
    store, errors = dist.HashStore(), {}

    def rank(number: int) -> None:
        versions.value = "stoker 1, torch 2.13.0" if number < 2 else "stoker 1, torch 2.6.0"
        try:
            paths.open_paths(store, number, 3, (4, 5, 6), timedelta(seconds=10))
        except ValueError as error:
            errors[number] = str(error)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    says = (
        "the version differs between the ranks: rank 4 has stoker 1, torch 2.13.0, rank 6 has stoker 1, torch 2.6.0; "
        "install the same on all hosts"
    )
    assert errors == dict.fromkeys(range(3), says)


def test_a_backend_that_cannot_be_registered_costs_one_line_and_not_the_import() -> None:
    code = textwrap.dedent("""
        import torch.distributed as dist
        dist.Backend.backend_list = [name for name in dist.Backend.backend_list if name != "ccl"]
        def broken(*words, **named):
            raise OSError("out of order")
        dist.Backend.register_backend = broken
        from stoker.comm.registration import register
        register()
        print("still here")
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "still here\n"
    assert done.stderr.splitlines()[-1] == "stoker ccl: the backend is not registered: OSError: out of order"
