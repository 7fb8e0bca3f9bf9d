"""A script without torch and Stoker: reports its rank and arguments, then does what its arguments request."""

import json
import os
import sys
import time
from pathlib import Path

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "OWN")
found = {
    "argv": [word if len(word) < 1000 else word[0] + str(len(word)) for word in sys.argv[1:]],  # lines stay whole
    "cores": sorted(os.sched_getaffinity(0)),
    "host": os.uname().nodename,
    "file": __file__,
    "name": __name__,
    "pid": os.getpid(),
    "path": sys.path[0],
    "cmdline": Path("/proc/self/cmdline").read_text(errors="replace").rstrip("\0"),
    **{name: os.environ.get(name) for name in NAMES},
}
print("REPORT " + json.dumps(found), flush=True)
what, _, rank = (sys.argv[1] if len(sys.argv) > 1 else "").partition("@")
mine = not rank or rank == os.environ.get("RANK")
if what == "raise" and mine:
    raise ValueError(f"boom of {os.environ.get('RANK')}")
if what == "exit" and mine:
    sys.exit(7)
if what == "kill" and mine:
    os.kill(os.getpid(), 9)
if what == "once" and mine and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
    sys.exit(3)
if what in ("raise", "exit", "kill", "hang"):
    time.sleep(60)
if what.startswith("until="):
    while not os.path.exists(what[6:]):
        time.sleep(0.1)
if what == "bar":
    for step in range(3):
        sys.stderr.write(f"\r{step}/3 of {os.environ.get('RANK')}")
    sys.stderr.write("\n")
