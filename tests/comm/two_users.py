"""One rank of a job of one user: `two_users.py UID HOME NUMBER RANK PORT FORBIDDEN`. Python itself starts as root, because it may
be installed where nobody else can read it; everything of the job happens as the user.

Prints READY, reads the pid of the other user's rank, allreduces for a while, and prints what it saw as JSON.
"""

from __future__ import annotations

import ctypes
import json
import os
import stat
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from stoker.comm import compiled, process_group
from stoker.comm.registration import register
from stoker.kernels import native
from stoker.machine import cache_directory

_PR_SET_DUMPABLE = 4  # linux/prctl.h: else a process that has changed its user is closed to that user's others


def become(uid: int) -> None:
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1)


def own_segments() -> list[str]:
    """Descriptors of Stoker's shared memory, which this process holds open."""
    links = {path: os.readlink(path) for path in Path("/proc/self/fd").iterdir() if os.path.lexists(path)}
    return [str(path) for path, link in links.items() if link.startswith(("/memfd:stoker", "/dev/shm/stoker"))]


def can_open_what_others_hold(pid: int) -> bool:
    try:
        return bool(os.listdir(f"/proc/{pid}/fd"))
    except PermissionError:
        return False


def why_not_compiled(folder: str) -> str:
    os.environ["STOKER_CACHE_DIR"] = folder
    try:
        compiled.build()
    except compiled.CompiledUnavailable as error:
        return str(error)
    finally:
        del os.environ["STOKER_CACHE_DIR"]
    return "compiled"


uid, home, number, rank, port, forbidden = int(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:6]), sys.argv[6]
register()
torch.set_num_threads(1)
native.library()
native.directories = list  # only the user's own cache is looked into
assert process_group.create is not None  # imported by now: after this, Python's own modules may be out of reach
become(uid)
os.environ.update(HOME=home)
reason = why_not_compiled(forbidden)
cache_directory.save("figures.json", {"number": number})
dist.init_process_group("ccl", f"tcp://127.0.0.1:{port}", timedelta(seconds=60), rank=rank, world_size=2)
dist.barrier()
print("READY", flush=True)
other = int(sys.stdin.readline())
sums = set()
for _ in range(200):
    x = torch.full((50_000,), float(number + rank))
    dist.all_reduce(x)
    sums.update(x.unique().tolist())
found = {
    "uid": os.getuid(),
    "sums": sorted(sums),
    "modes": sorted({oct(stat.S_IMODE(os.stat(path).st_mode)) for path in own_segments()}),
    "owners": sorted({os.stat(path).st_uid for path in own_segments()}),
    "sees the other": can_open_what_others_hold(other),
    "without a cache": reason,
    "cached": cache_directory.load("figures.json"),
    "backend": type(dist.group.WORLD._get_backend(torch.device("cpu"))).__name__,
}
print(json.dumps(found), flush=True)
dist.destroy_process_group()
