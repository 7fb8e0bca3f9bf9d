"""Runs many cases: `python tests/attack/run.py --cases 3000 --kills 200`. `--only KIND:NUMBER` runs one case again.

Prints counts at the end; the exit code is 1 if a case failed.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])

from attack.case import seed_of_today  # noqa: E402

__all__ = ["Server", "attack", "command_again", "describe", "draw"]


class Server:
    """A process that runs server.py."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="stoker-attack-")
        words = [sys.executable, str(Path(__file__).with_name("server.py")), self._folder.name]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.ready = self._read("READY")

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._read("RESULT")

    def _read(self, mark: str) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(mark):
                answer: dict[str, Any] = json.loads(line[len(mark) :])
                return answer
        raise RuntimeError(f"the server of cases ended with exit code {self._process.wait()}")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=120)
        self._folder.cleanup()


def draw(seed: int, cases: int, kills: int) -> list[dict[str, Any]]:
    """The requests of a run: all kinds by their shares, shuffled."""
    from attack.kinds import KINDS

    whole = sum(kind.share for kind in KINDS.values())
    requests = [
        {"seed": seed, "kind": name, "number": number}
        for name, kind in KINDS.items()
        for number in range(round(cases * kind.share / whole))
    ]
    # A run is killed at least once, so this many runs are enough.
    requests += [{"seed": seed, "kind": "kill", "number": number} for number in range(kills)]
    requests += [
        {"seed": seed, "kind": kind, "number": number}
        for kind in ("rankkill", "healkill")
        for number in range(kills // 20)
    ]
    random.Random(seed).shuffle(requests)
    return requests


def attack(
    requests: list[dict[str, Any]], jobs: int, kills: int | None = None, seconds: float | None = None
) -> Iterator[dict[str, Any]]:
    """The answers, in the order of arrival. Requests no more kills after `kills` of them, and nothing after `seconds`."""
    end = None if seconds is None else time.monotonic() + seconds
    left: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    killed = [0]
    answers: queue.SimpleQueue[dict[str, Any] | BaseException | None] = queue.SimpleQueue()
    for request in requests:
        left.put(request)

    def work() -> None:
        try:
            server = Server()
            if reason := server.ready.get("refused"):
                raise SystemExit(f"nothing was done: {reason}")
            while not left.empty() and (end is None or time.monotonic() < end):
                try:
                    request = left.get_nowait()
                except queue.Empty:
                    break
                if request["kind"] == "kill" and kills is not None and killed[0] >= kills:
                    continue
                answer = server.ask(request)
                killed[0] += answer.get("kills", 0)
                answers.put(answer)
            server.close()
            answers.put(None)
        except BaseException as error:
            answers.put(error)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    ended = 0
    while ended < jobs:
        answer = answers.get()
        if isinstance(answer, BaseException):
            raise answer
        if answer is None:
            ended += 1
        else:
            yield answer


def command_again(answer: dict[str, Any]) -> str:
    """The command that runs this case again and shows it."""
    return f"python tests/attack/run.py --seed {answer['seed']} --only {answer['kind']}:{answer['number']}"


_SHOWN = ("argv", "variables", "stdin", "files", "code", "output", "error", "story")


def describe(answer: dict[str, Any]) -> str:
    """A case with all details of its outcome."""
    found = "; ".join(answer["failures"]) or "good"
    lines = [f"{answer['kind']}:{answer['number']}: {found}", f"  again: {command_again(answer)}"]
    shown = [name for name in _SHOWN if answer.get(name) not in (None, "", {}, "b''")]
    return "\n".join([*lines, *(f"  {name}: {answer[name]}" for name in shown)])


def main() -> int:
    parser = argparse.ArgumentParser(description="Attacks Stoker with bad input, kills and odd environments.")
    parser.add_argument("--seed", type=int, default=seed_of_today(), help="the date without it")
    parser.add_argument("--cases", type=int, default=3000)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument(
        "--only", metavar="KIND:NUMBER", action="append", help="run this case alone, and show all of it"
    )
    parser.add_argument("--kind", action="append", help="only cases of this kind")
    parser.add_argument("--minutes", type=float, help="begin no case after so many")
    parser.add_argument("--log", help="append every failure to this file as JSON")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *rest: sys.exit(143))  # temporary folders are then removed, as after Ctrl-C
    if options.only:
        cases = [name.rpartition(":") for name in options.only]
        requests = [
            {"seed": options.seed, "kind": kind, "number": int(number), "verbose": True} for kind, _, number in cases
        ]
        options.jobs = 1
    else:
        requests = draw(options.seed, options.cases, options.kills)
        requests = [one for one in requests if not options.kind or one["kind"] in options.kind]
    print(
        f"seed {options.seed}: {sum(not one['kind'].endswith('kill') for one in requests)} cases, {options.kills} kills",
        flush=True,
    )
    seconds = None if options.minutes is None else 60 * options.minutes
    begin, counts, kinds = time.monotonic(), Counter[str](), Counter[str]()
    try:
        for seen, answer in enumerate(attack(requests, options.jobs, options.kills, seconds), 1):
            kinds[answer["kind"]] += 1
            for name in ("kills", "kills in healing"):
                counts[name] += answer.get(name, 0)
            counts.update(sorted({failure.partition(":")[0] for failure in answer["failures"]}))
            if answer["failures"] or options.only:
                print(describe(answer) if options.only else _short(answer), flush=True)
                if options.log:
                    with open(options.log, "a", encoding="utf-8") as file:
                        file.write(json.dumps(answer) + "\n")
            if seen % 200 == 0:
                cases = _cases(kinds)
                print(f"after {time.monotonic() - begin:.0f} s: {cases} cases, {counts['kills']} kills", flush=True)
    except RuntimeError as error:  # an error of the attack itself; the failures found so far still count
        print(error)
        counts["attack broke"] += 1
    return summary(options.seed, counts, kinds, time.monotonic() - begin)


def _short(answer: dict[str, Any]) -> str:
    return f"{'; '.join(answer['failures'])[:300]}\n  {command_again(answer)}"


def _cases(kinds: Counter[str]) -> int:
    return sum(count for kind, count in kinds.items() if not kind.endswith("kill"))


def summary(seed: int, counts: Counter[str], kinds: Counter[str], seconds: float) -> int:
    rows = [("cases", _cases(kinds)), ("kills", counts.pop("kills", 0))]
    rows.append(("second kills, in healing", counts.pop("kills in healing", 0)))
    bad = {
        name: counts.pop(name, 0)
        for name in ("traceback", "hang", "crash", "code", "silent", "message", "lost", "different")
    }
    names = {"traceback": "tracebacks", "hang": "hangs over 30 s", "crash": "ended by a signal", "code": "other exit codes",
             "silent": "refused without a word", "message": "messages too long or unclean", "lost": "lost checkpoints",
             "different": "finished runs that differ"}  # fmt: skip
    rows += [(names[name], count) for name, count in bad.items()]
    rows += [("leftovers", counts.pop("leftover", 0)), *counts.items()]
    print(
        f"\nseed {seed}, {seconds / 60:.0f} minutes; "
        + ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items()))
    )
    for name, count in rows:
        print(f"  {name:<28}{count:>6}")
    return 1 if any(count for name, count in rows[3:]) else 0


if __name__ == "__main__":
    sys.exit(main())
