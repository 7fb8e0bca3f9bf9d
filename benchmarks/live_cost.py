"""What `--live` costs: the time of a training step without it, with a page that is open, and with readers that do not read.

    python benchmarks/live_cost.py                            MiniLM on MRPC, three rounds of 60 steps, about four minutes
    python benchmarks/live_cost.py --rounds 1 --steps 12      to see that it works

Each side is a run of `stoker train classify ... --logging_steps 1`; rounds take the sides in turn. "open page" reads the stream
of changes as a browser does. "slow readers" are four connections that ask for the stream and never read it. The time of a step is
what the run log says, without the first steps; the ratio is the median over rounds of the medians' ratio within a round.
"""

from __future__ import annotations

import argparse
import http.client
import json
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from urllib.parse import urlsplit

from bars import cpu_name
from minilm import pretrained

SIDES = ("without", "open page", "slow readers")
WARM_UP = 5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, default=Path(__file__).resolve().parents[2] / "shared" / "data")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    chosen = parser.parse_args()
    found: dict[str, list[float]] = {side: [] for side in SIDES}
    for number in range(chosen.rounds):
        for side in SIDES:
            with tempfile.TemporaryDirectory() as folder:
                found[side].append(run(side, Path(folder), chosen))
            print(f"round {number + 1}, {side}: {1000 * found[side][-1]:.1f} ms per step", flush=True)
    print(f"\n{cpu_name()}; medians of {chosen.rounds} rounds of {chosen.steps} steps\n")
    for side in SIDES:
        ratio = statistics.median(one / base for one, base in zip(found[side], found["without"], strict=True))
        print(f"{side:14} {1000 * statistics.median(found[side]):7.1f} ms per step, {ratio:.3f} of the time without")
    return 0


def run(side: str, folder: Path, chosen: argparse.Namespace) -> float:
    """The median time of a step, in seconds."""
    command = [sys.executable, "-m", "stoker", "train", "classify", "--model_name_or_path", str(pretrained()), "--do_train",
               "--train_file", str(chosen.data / "mrpc" / "train.tsv"), "--max_steps", str(chosen.steps + WARM_UP),
               "--per_device_train_batch_size", "16", "--logging_steps", "1", "--report_to", "none",
               "--output_dir", str(folder)]  # fmt: skip
    command += [] if side == "without" else ["--live"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as training:
        assert training.stderr is not None
        for line in training.stderr:
            if address := re.search(r"watch it at (http://\S+)", line):
                visit(side, address[1])
    if training.returncode:
        raise SystemExit(f"training ended with exit code {training.returncode}")
    entries = map(json.loads, (folder / "run.jsonl").read_text().splitlines())
    steps = [sum(one["phases"].values()) for one in entries if one["kind"] == "step"]
    return statistics.median(steps[WARM_UP:])


def visit(side: str, address: str) -> None:
    place = urlsplit(address)
    host, port = str(place.hostname), int(place.port or 80)
    if side == "open page":
        connection = http.client.HTTPConnection(host, port)
        connection.request("GET", f"{place.path}events")
        threading.Thread(target=connection.getresponse().read, daemon=True).start()
        return
    for _ in range(4):
        reader = socket.create_connection((host, port))
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.sendall(f"GET {place.path}events HTTP/1.1\r\nHost: {place.netloc}\r\n\r\n".encode())
        unread.append(reader)


unread: list[socket.socket] = []
"""Connections that stay open until this program ends."""

if __name__ == "__main__":
    sys.exit(main())
