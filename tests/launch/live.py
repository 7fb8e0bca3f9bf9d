"""Real launches for tests: `stoker launch` as a person starts it, its ranks' reports, and a look at what is left running."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rig import warm

SCRIPTS = Path(__file__).parent / "scripts"
STOKER = [sys.executable, "-c", "import sys; from stoker.cli import main; sys.exit(main(sys.argv[1:]))"]
HOSTILE = [
    "",
    "a b",
    "it's",
    '"quoted"',
    "$(touch pwned)",
    "`touch pwned`",
    "$HOME",
    "new\nline",
    "\\",
    "*",
    "~",
    "--",
    "ü",
]


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Without what a launcher above the tests, or the person's own config, would add."""
    kept = {
        k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "PMI", "SLURM_", "MASTER_", "TORCHELASTIC"))
    }
    return {**kept, "XDG_CONFIG_HOME": "/nonexistent", "HF_HOME": "/nonexistent", **(more or {})}


def launch(  # 400 s: the first launch with `ccl` compiles its backend, perhaps on busy cores
    *words: str, env: Mapping[str, str] | None = None, cwd: Path | None = None, timeout: float = 400
) -> subprocess.CompletedProcess[str]:
    return warm.run(
        [*STOKER, "launch", *words],
        env=environment(env),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def lost_output(kind: str) -> int:
    """A descriptor that takes nothing: its reader has gone (`| head -1`), or the disk is full."""
    if kind == "full disk":
        return os.open("/dev/full", os.O_WRONLY)
    read, write = os.pipe()
    os.close(read)
    return write


def reports(text: str) -> dict[int, dict[str, Any]]:
    """What each rank has reported, by rank; a process without a rank is 0."""
    found: dict[int, dict[str, Any]] = {}
    for line in text.splitlines():
        _, mark, rest = line.partition("REPORT ")
        if mark:
            one = json.loads(rest)
            found[int(one.get("rank", one.get("RANK")) or 0)] = one
    return found


def running(marks: Sequence[str], seconds: float = 5.0) -> list[str]:
    """Commands on this machine that carry all of `marks`, once they have had a moment to end."""
    end = time.monotonic() + seconds
    while (found := _look(marks)) and time.monotonic() < end:
        time.sleep(0.05)
    return found


def _look(marks: Sequence[str]) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if all(mark in line for mark in marks):
                found.append(line)
    return found
