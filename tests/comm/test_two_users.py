"""Two jobs of two users on one host at once: neither can access the other, and nothing is left behind."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from comm.ranks import free_port
from comm.test_faults import left_behind, segments
from stoker.comm import compiled

PROGRAM = str(Path(__file__).with_name("two_users.py"))
USERS = {10: 65534, 500: 1}
"""The number that a job adds up -> the uid of its user: nobody and daemon."""


@pytest.fixture
def homes() -> Iterator[dict[int, Path]]:
    """Open to each user alone, with what the backend compiled to; not below pytest's folder, which is root's."""
    made = {uid: Path(tempfile.mkdtemp(prefix="stoker-home-")) for uid in USERS.values()}
    for uid, home in made.items():
        cache = home / ".cache" / "stoker"
        cache.mkdir(parents=True)
        shutil.copy(compiled.build(), cache)
        for path in (home, *home.rglob("*")):
            os.chown(path, uid, uid)
    yield made
    for home in made.values():
        shutil.rmtree(home)


@pytest.mark.root
def test_two_jobs_of_two_users_run_side_by_side(homes: dict[int, Path], tmp_path: Path) -> None:
    before, forbidden = segments(), tmp_path / "roots"
    forbidden.mkdir(mode=0o700)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("STOKER_C", "XDG_"))}
    ranks: list[tuple[int, subprocess.Popen[str]]] = []
    for (number, uid), kind in zip(USERS.items(), ("memfd", "named"), strict=True):
        port = free_port()
        for rank in range(2):
            words = [uid, homes[uid], number, rank, port, forbidden]
            process = subprocess.Popen(
                [sys.executable, PROGRAM, *map(str, words)], env={**kept, "STOKER_CCL_SHM": kind, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )  # fmt: skip
            ranks.append((number, process))
    try:
        for _, process in ranks:
            assert process.stdout is not None
            assert process.stdout.readline() == "READY\n", process.communicate()[1][-2000:]
        assert not left_behind(before), "a segment has a name while all ranks are attached"
        for place, (_, process) in enumerate(ranks):
            assert process.stdin is not None
            process.stdin.write(f"{ranks[place - 2][1].pid}\n")
            process.stdin.flush()
        for number, process in ranks:
            output, errors = process.communicate(timeout=60)
            assert process.returncode == 0, errors[-2000:]
            found = json.loads(output)
            uid = USERS[number]
            assert found == {
                "uid": uid, "sums": [2.0 * number + 1], "modes": found["modes"], "owners": found["owners"],
                "sees the other": False, "without a cache": found["without a cache"], "cached": {"number": number},
                "backend": "Backend",
            }  # fmt: skip
            assert found["without a cache"].startswith(f"{forbidden} cannot be written: ")
            assert found["modes"] in (["0o600"], []), "the first rank holds the segment, the other has let go of it"
            assert found["owners"] in ([uid], [])
            assert "gloo" not in errors
    finally:
        for _, process in ranks:
            process.kill()
            process.wait()
    assert not left_behind(before)
