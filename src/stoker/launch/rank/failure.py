"""The first failure among the ranks: finds it, prints it after all other output, and determines the command's exit code."""

from __future__ import annotations

import json
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Failure", "killed", "of_launch", "parse", "print_last", "read_ends", "read_reports", "wait_for_output"]


@dataclass(frozen=True)
class Failure:
    rank: int | None
    """None: not a rank, but the launch itself."""
    host: str
    time: float
    code: int
    """An exit code; 128 + n for signal n."""
    text: str
    """The traceback, or another description of the failure."""


def parse(record: str) -> Failure | None:
    try:
        found: dict[str, Any] = json.loads(record)
        rank = None if found["rank"] is None else int(found["rank"])
        return Failure(rank, str(found["host"]), float(found["time"]), int(found["code"]), str(found["text"]))
    except (ValueError, KeyError, TypeError):
        return None


def read_reports(directory: Path) -> list[Failure]:
    """The failures that the ranks of this host have reported, the earliest first."""
    found = [parse(path.read_text(encoding="utf-8")) for path in directory.glob("failed.*.json")]
    return sorted((failure for failure in found if failure), key=lambda failure: failure.time)


def read_ends(directory: Path) -> dict[int, float]:
    """When each rank of this host ended, as its forwarder saw it."""
    return {int(path.suffix[1:]): path.stat().st_mtime for path in directory.glob("ended.*")}


def wait_for_output(directory: Path, seconds: float = 5.0) -> None:
    """Waits until the forwarders of the ranks have written their last lines, for at most `seconds`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and any(directory.glob("forwarding.*")):
        time.sleep(0.02)


def of_launch(text: str, code: int = 1) -> Failure:
    return Failure(None, "", 0.0, code, text)


def killed(rank: int, host: str, number: int) -> Failure:
    name = signal.Signals(number).name if number in set(signal.Signals) else str(number)
    why = {
        "SIGKILL": "by the system when memory runs out (see dmesg), or by a person",
        "SIGSEGV": "by a crash in native code; PYTHONFAULTHANDLER=1 shows where",
        "SIGBUS": "often because /dev/shm is full",
        "SIGILL": "by an instruction that this CPU does not have",
    }.get(name, "from outside")
    return Failure(rank, host, 0.0, 128 + number, f"it was ended by {name}, {why}\n")


def print_last(failure: Failure) -> None:
    """Prints which rank failed, on which host, and its traceback; to be called after all other output."""
    sys.stdout.flush()
    if failure.rank is None:
        print(f"\nstoker: {failure.text.strip()}; all ranks were ended", file=sys.stderr, flush=True)
        return
    text = failure.text.rstrip() or f"it ended with exit code {failure.code}"
    print(
        f"\nstoker: rank {failure.rank} on {failure.host} failed first, exit code {failure.code}; all ranks were ended.\n"
        f"{text}",
        file=sys.stderr,
        flush=True,
    )
