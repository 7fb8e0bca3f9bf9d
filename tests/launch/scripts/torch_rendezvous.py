"""One machine in torch's own rendezvous: `torch_rendezvous.py ENDPOINT [--serve] [--clock SECONDS] [--keep_alive SECONDS]`.

Joins a rendezvous of two machines over c10d with short time-outs, then asks for waiting machines twice a second, as torch's agent
does. Prints one JSON object per line. `--clock` sets this machine's clock ahead (or back, if negative).
"""

import argparse
import json
import signal
import sys
import time
from datetime import datetime, timedelta, tzinfo

from torch.distributed.elastic.rendezvous import RendezvousParameters, dynamic_rendezvous
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend

parser = argparse.ArgumentParser()
parser.add_argument("endpoint")
parser.add_argument("--serve", action="store_true", help="hold the store")
parser.add_argument("--clock", type=float, default=0.0)
parser.add_argument("--keep_alive", type=int, default=1)
args = parser.parse_args()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # in Python, as the agent's handler is


class Clock(datetime):
    @classmethod
    def now(cls, tz: tzinfo | None = None) -> datetime:
        return datetime.now(tz) + timedelta(seconds=args.clock)


dynamic_rendezvous.datetime = Clock
parameters = RendezvousParameters(
    "c10d", args.endpoint, "run", 2, 2, args.endpoint.partition(":")[0], is_host=args.serve, read_timeout=2,
    join_timeout=20, heartbeat_timeout=3, keep_alive_interval=args.keep_alive, keep_alive_max_attempt=3,
)  # fmt: skip
backend, store = create_backend(parameters)
handler = dynamic_rendezvous.create_handler(store, backend, parameters)
try:
    joined = handler.next_rendezvous()
except dynamic_rendezvous.RendezvousTimeoutError:
    print(json.dumps({"error": "timeout"}), flush=True)
    raise SystemExit(1) from None
print(json.dumps({"machines": joined.world_size}), flush=True)
while True:
    waiting = handler.num_nodes_waiting()
    print(json.dumps({"members": len(handler._state_holder.state.participants), "waiting": waiting}), flush=True)
    time.sleep(0.5)
