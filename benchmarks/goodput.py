"""How much of the time is training when ranks or hosts are killed: MiniLM on SQuAD by four ranks, with `--heal` or restarts.

    python benchmarks/goodput.py --data ../shared/data/squad --every 300 --steps 200
    python benchmarks/goodput.py --data ../shared/data/squad --every 300 --steps 200 --hosts

Three runs of the same command, `stoker launch -n 4 -m stoker train qa`, and the same steps:

    undisturbed   nobody is killed
    heal          --heal; a random rank gets SIGKILL every N seconds, first after N/2
    restart       the same kills, without --heal: torchrun's agent restarts all ranks from a checkpoint of every --save_steps

With --hosts the four ranks are on two fake hosts (network namespaces; needs root). The processes of the second get SIGKILL, and
its launch is started again at once, as a supervisor would do it. There is no side "restart" then.

A run that is in the folder --out already is not repeated, so the sides can be measured one at a time (--side). Goodput is the
share of the wall time, from the first step to the last, that was not lost. What a kill costs is the time from the last step
before it to the first new step after it, less the median time of a step of that run: detection, the new process, the state it
gets, and what was repeated. Exit code 1: a bar was missed (--heal: at most 10 s and one step per kill, goodput 0.95 with a kill
every 300 s, the other processes go on, weights within 1e-5 of the undisturbed run).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minilm import pretrained

STOKER = [sys.executable, "-c", "import sys; from stoker.cli import main; sys.exit(main(sys.argv[1:]))", "launch"]
RANKS = 4
SIDES = ("undisturbed", "heal", "restart")
SECONDS, GOODPUT, DIFFERENCE = 10.0, 0.95, 1e-5
_NOT_RANKS = ("stoker-keeper", "stoker-output")


def command(
    side: str, options: argparse.Namespace, folder: Path, where: Sequence[str] = ("-n", str(RANKS))
) -> list[str]:
    launch = {"undisturbed": [], "heal": ["--heal"], "restart": ["--max_restarts", "100"]}[side]
    save = ["--save_steps", str(options.save_steps)] if side == "restart" else ["--save_strategy", "no"]
    return [
        *STOKER, *where, "--oversubscribe", *launch, "-m", "stoker", "train", "qa",
        "--model_name_or_path", pretrained(), "--train_file", str(options.data / "train-v1.1.json.gz"),
        "--max_train_samples", "4000", "--do_train",
        "--per_device_train_batch_size", "3", "--max_steps", str(options.steps), "--logging_steps", "1", *save,
        "--learning_rate", "1e-4", "--ddp_backend", "ccl", "--report_to", "none", "--disable_tqdm", "true",
        "--output_dir", str(folder),
    ]  # fmt: skip


def steps_of(folder: Path) -> list[tuple[float, int]]:
    """When each step ended, in the order of the run log; a step that was repeated is there twice."""
    found = []
    for line in (folder / "run.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["kind"] == "step":
            found.append((record["time"], record["step"]))
    return found


def descendants(launch: int) -> dict[int, str]:
    """The names of the processes below a launch."""
    parents, names = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                name, rest = (entry / "stat").read_text().split("(", 1)[1].rsplit(")", 1)
            except OSError:
                continue
            names[int(entry.name)], parents[int(entry.name)] = name, int(rest.split()[1])
    found = {}
    for pid in parents:
        line = [pid]
        while line[-1] in parents and line[-1] != launch:
            line.append(parents[line[-1]])
        if line[-1] == launch and pid != launch:
            found[pid] = names[pid]
    return found


def memory_of_keepers(launch: int) -> int:
    """Bytes, with the share of each keeper in pages that it shares with other processes."""
    total = 0
    for pid, name in descendants(launch).items():
        if name == "stoker-keeper":
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += 1024 * int(next(line for line in lines if line.startswith("Pss:")).split()[1])
    return total


def ranks_of(launch: int) -> dict[int, int]:
    """The process of each rank below a launch: those that are neither keepers nor forwarders of output."""
    found = {}
    for pid, name in descendants(launch).items():
        if name in _NOT_RANKS:
            continue
        try:
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        rank = next((int(one[5:]) for one in variables if one.startswith(b"RANK=")), None)
        if rank is not None:
            found[rank] = pid
    return found


class OneHost:
    """Four ranks on this host; `kill` takes one of them."""

    others = RANKS - 1
    """Processes that are not killed."""

    def __init__(self, side: str, options: argparse.Namespace, folder: Path, log: Any) -> None:
        self._draw = random.Random(options.seed)
        self.first = subprocess.Popen(command(side, options, folder), stdout=log, stderr=log)

    def kill(self) -> dict[str, Any]:
        """Kills a random rank, and waits until there is another process in its place."""
        before, memory = ranks_of(self.first.pid), memory_of_keepers(self.first.pid)
        rank = self._draw.randrange(RANKS)
        os.kill(before[rank], signal.SIGKILL)
        at = time.time()
        after: dict[int, int] = {}
        while self.first.poll() is None and (len(after) < RANKS or after[rank] == before[rank]):
            time.sleep(0.2)
            after = ranks_of(self.first.pid)
        kept = sum(after.get(other) == before[other] for other in range(RANKS) if other != rank)
        return {"time": at, "rank": rank, "processes_kept": kept, "keepers_bytes": memory}

    def close(self) -> None:
        pass


class TwoHosts:
    """Two ranks on each of two fake hosts; `kill` takes the second host and starts its launch again."""

    others = RANKS // 2

    def __init__(self, side: str, options: argparse.Namespace, folder: Path, log: Any) -> None:
        sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
        from rig import Rig

        self._rig = Rig(2).__enter__()
        self._start = lambda host: subprocess.Popen(
            self._rig.command(host, command(side, options, folder, self._where(host))), stdout=log, stderr=log
        )
        self.first, self._second = map(self._start, self._rig.hosts)

    def _where(self, host: str) -> list[str]:
        number = str(self._rig.hosts.index(host))
        return ["--num_machines", "2", "--machine_rank", number, "-ppn", str(RANKS // 2),
                "--main_process_ip", self._rig.address("alpha"), "--main_process_port", "29500"]  # fmt: skip

    def kill(self) -> dict[str, Any]:
        before, memory = ranks_of(self.first.pid), memory_of_keepers(self.first.pid)
        for pid in self._rig.processes("beta"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        at = time.time()
        self._second.wait()
        self._second = self._start("beta")
        while self.first.poll() is None and len(ranks_of(self._second.pid)) < RANKS // 2:
            time.sleep(0.2)
        kept = len(set(before.values()) & set(ranks_of(self.first.pid).values()))
        return {"time": at, "rank": -1, "processes_kept": kept, "keepers_bytes": 2 * memory}

    def close(self) -> None:
        self._second.wait()
        self._rig.close()


def run(side: str, options: argparse.Namespace) -> dict[str, Any]:
    folder = options.out / side
    shutil.rmtree(folder, ignore_errors=True)
    kills: list[dict[str, Any]] = []
    begin = time.time()
    with open(options.out / f"{side}.log", "w") as log:
        job = (TwoHosts if options.hosts else OneHost)(side, options, folder, log)
        first: float | None = None
        while job.first.poll() is None:
            time.sleep(0.2)
            if first is None:
                first = time.time() if (folder / "run.jsonl").exists() and steps_of(folder) else None
            elif side != "undisturbed" and time.time() - first > options.every * (len(kills) + 0.5):
                kills.append(job.kill())
        job.close()
    if job.first.returncode:
        raise SystemExit(
            f"{side}: the launch ended with exit code {job.first.returncode}; see {options.out / side}.log"
        )
    return {"started": begin, "steps": steps_of(folder), "kills": kills, "settings": settings(options)}


def settings(options: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(options, name) for name in ("steps", "every", "seed", "save_steps")}


def figures(found: dict[str, Any]) -> dict[str, Any]:
    """Seconds lost and steps repeated for each kill, the usual time of a step, wall time and goodput."""
    steps: list[tuple[float, int]] = [(at, number) for at, number in found["steps"]]
    usual = statistics.median(b[0] - a[0] for a, b in itertools.pairwise(steps))
    lost, repeated = [], []
    for one in found["kills"]:
        before = max(index for index, (at, _) in enumerate(steps) if at <= one["time"])
        after = next(index for index in range(before + 1, len(steps)) if steps[index][1] > steps[before][1])
        lost.append(steps[after][0] - steps[before][0] - usual)
        repeated.append(after - before - 1)
    wall = steps[-1][0] - steps[0][0]
    return {"usual": usual, "lost": lost, "repeated": repeated, "wall": wall, "goodput": 1 - sum(lost) / wall}


def largest_difference(one: Path, other: Path) -> float:
    from safetensors.torch import load_file

    ours, theirs = (load_file(folder / "model.safetensors") for folder in (one, other))
    return max(float((ours[name].double() - theirs[name].double()).abs().max()) for name in theirs)


def summary(runs: dict[str, Any], options: argparse.Namespace) -> bool:
    """Prints the figures of each side; returns whether a bar was missed."""
    missed, others = False, (TwoHosts if options.hosts else OneHost).others
    for side, run in runs.items():
        found = figures(run)
        print(f"{side}: {len(run['steps'])} steps in {found['wall']:.0f} s, median step {found['usual']:.2f} s")
        if side == "undisturbed":
            continue
        kept = min((one["processes_kept"] for one in run["kills"]), default=others)
        seconds = " ".join(f"{one:.1f}" for one in found["lost"])
        print(f"  {len(run['kills'])} kills, one every {options.every} s: {seconds} s lost, complete steps repeated "
              f"{' '.join(map(str, found['repeated']))}; goodput {found['goodput']:.3f}; of the other {others} processes "
              f"{kept} stayed")  # fmt: skip
        if not run["kills"]:
            continue
        lost = statistics.median(found["lost"])
        print(f"  median {lost:.1f} s: goodput with a kill every 300 s {300 / (300 + lost):.3f}")
        if memory := max(one["keepers_bytes"] for one in run["kills"]):
            print(f"  memory of all keepers {memory / 1e6:.0f} MB")
        difference = None
        if "undisturbed" in runs:
            difference = largest_difference(options.out / side, options.out / "undisturbed")
            print(f"  largest difference of a weight from the undisturbed run {difference:.1e}")
        if side == "heal":
            missed = lost > SECONDS or max(found["repeated"]) > 1 or kept < others
            missed |= 300 / (300 + lost) < GOODPUT or (difference or 0.0) > DIFFERENCE
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with train-v1.1.json.gz")
    parser.add_argument("--out", type=Path, default=Path("build/goodput"), help="folder for the runs and goodput.json")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=float, default=300.0, help="seconds between kills")
    parser.add_argument("--save_steps", type=int, default=20, help="of the side that restarts")
    parser.add_argument("--seed", type=int, default=0, help="chooses the ranks that are killed")
    parser.add_argument("--hosts", action="store_true", help="kill one of two fake hosts instead of a rank; needs root")
    parser.add_argument("--side", action="append", choices=SIDES, help="only this one (repeatable)")
    options = parser.parse_args()
    options.out = options.out.resolve() / ("hosts" if options.hosts else "ranks")
    options.out.mkdir(parents=True, exist_ok=True)
    store = options.out / "goodput.json"
    runs = json.loads(store.read_text()) if store.exists() else {}
    for side in options.side or SIDES[: 2 if options.hosts else 3]:
        if runs.get(side, {}).get("settings") != settings(options):
            runs[side] = run(side, options)
            store.write_text(json.dumps(runs))
    return int(summary(runs, options))


if __name__ == "__main__":
    raise SystemExit(main())
