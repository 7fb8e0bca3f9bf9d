"""One process of a job with two ranks whose rank 1 is killed: `regroup_process.py ROLE BACKEND [OPERATIONS]`.

    survivor    rank 0. It forms a group, loses rank 1, and tries until it has formed one with a process that took its place
    first       rank 1. It forms the group, and is killed
    killed      takes the place of rank 1 and agrees on a roster; while the group is formed it is killed, before an operation in
                the store: OPERATIONS of them are done
    newcomer    takes the place of rank 1

Survivor and newcomer print which attempt to form a group succeeded, and the sum of all ranks plus one.
"""

# ruff: noqa: E402
import contextlib
import os
import signal
import sys
from datetime import timedelta

ROLE, BACKEND = sys.argv[1:3]
OPERATIONS = int(sys.argv[3]) if len(sys.argv) > 3 else 0
RANK, SIZE = int(ROLE != "survivor"), 2

import torch
import torch.distributed as dist

from stoker.comm.registration import register
from stoker.distributed.lost_rank import LostRank, joined
from stoker.distributed.regroup import HealingGroup, NotFormed, is_lost_connection
from stoker.distributed.roster import Roster

LONG = timedelta(minutes=10)


class DyingStore(dist.Store):
    """Kills this process before one of its operations."""

    def __init__(self, store):
        super().__init__()
        self.store, self.left = store, OPERATIONS

    def live(self):
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1
        return self.store

    def set(self, key, value):
        self.live().set(key, value)

    def get(self, key):
        return self.live().get(key)

    def multi_get(self, keys):
        return self.live().multi_get(keys)

    def check(self, keys):
        return self.live().check(keys)

    def wait(self, keys, *limit):
        self.live().wait(keys, *limit)


def agree(group: HealingGroup, position: tuple[int, int] | None, signal_: int | None) -> Roster:
    return group.roster_store.agree(position, "", signal_, seconds=60, check=lambda: None)


def total() -> int:
    tensor = torch.tensor([RANK + 1.0])
    dist.all_reduce(tensor)
    return int(tensor.item())


def form(group: HealingGroup, position: tuple[int, int] | None, signal_: int | None) -> None:
    """As the Trainer does it."""
    for attempt in range(1, 6):
        group.leave()
        try:
            group.form(agree(group, position, signal_), lambda: None)
            joined()
            print("attempt", attempt, "sum", total(), flush=True)
            return
        except Exception as error:
            if not isinstance(error, NotFormed) and not is_lost_connection(error):
                raise
    raise SystemExit("no group was formed")


register()
torch.set_num_threads(1)
if ROLE in ("killed", "newcomer"):
    LostRank(signal.SIGKILL, 0.0).tell_replacement()
group = HealingGroup(BACKEND, RANK, SIZE, LONG)
if ROLE in ("survivor", "first"):
    print("formed", total(), flush=True)
if ROLE == "first":
    os.kill(os.getpid(), signal.SIGKILL)
elif ROLE == "survivor":
    with contextlib.suppress(RuntimeError):
        total()
    form(group, (1, 0), None)
elif ROLE == "killed":
    group.leave()
    number = agree(group, None, signal.SIGKILL).number
    shared = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=LONG)
    dist.PrefixStore(f"stoker/heal/here/{number}", shared).set(str(RANK), "")
    store = DyingStore(dist.PrefixStore(f"stoker/heal/group/{number}", shared))
    dist.init_process_group(BACKEND, store=store, rank=RANK, world_size=SIZE, timeout=LONG)
else:
    form(group, None, signal.SIGKILL)
