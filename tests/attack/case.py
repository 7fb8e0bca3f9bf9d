"""A case (a command line and its files), its outcome, and what counts as a failure."""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = ["SECONDS", "Case", "Outcome", "chance_of", "failures", "seed_of_tests", "seed_of_today"]

SECONDS = 30.0
"""Seconds; a case that takes longer counts as hanging."""
_LINES, _CHARACTERS = 8, 2500
"""Of the longest message: a sentence, or one that lists the first five bad rows of a file and counts the rest. Lines that say
what the run is doing, which end with dots, are not counted."""
_TRACEBACK = re.compile(
    r"Traceback \(most recent call last\)|^Exception ignored in|Fatal Python error|^--- Logging error", re.M
)
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


@dataclass(frozen=True)
class Case:
    argv: list[str]
    files: dict[str, bytes] = field(default_factory=dict)
    """Written into the working directory before the command runs; a failure if they are changed."""
    links: dict[str, str] = field(default_factory=dict)
    """Symbolic links in the working directory."""
    stdin: bytes = b""
    variables: dict[str, str | None] = field(default_factory=dict)
    """Environment variables to set, or to remove."""
    writes: tuple[str, ...] = ()
    """Names in the working directory that the command may create or change."""
    codes: tuple[int, ...] = (0, 2)
    prepare: Callable[[], None] | None = None
    """Called in the forked child, in its working directory, before the command."""
    before: Callable[[str], None] | None = None
    """Called with the case's folder before the fork; `after` undoes it."""
    after: Callable[[str], None] | None = None
    process: bool = False
    """Start a new Python process: what Python sets up at its start cannot be changed in a fork."""
    open_output: bool = True
    """Whether its messages can be read; if not, only the exit code and leftover files and processes are checked."""


@dataclass
class Outcome:
    code: int | None
    """None: it was still running after the time limit."""
    output: str = ""
    error: str = ""
    left: list[str] = field(default_factory=list)
    """Files and processes that should not be there."""
    seconds: float = 0.0


def failures(case: Case, outcome: Outcome) -> list[str]:
    """The failures of an outcome, each as `kind: detail`; empty if there are none."""
    found = []
    if outcome.code is None:
        found.append(f"hang: still running after {outcome.seconds:.0f} s")
    elif outcome.code < 0:
        found.append(f"crash: ended by signal {-outcome.code}")
    elif outcome.code not in case.codes:
        found.append(f"code: exit code {outcome.code}")
    printed = outcome.output + outcome.error
    if _TRACEBACK.search(printed):
        found.append("traceback: " + (printed.strip().splitlines() or [""])[-1][:200])
    if outcome.code == 2 and case.open_output:
        lines = [
            line
            for line in outcome.error.strip().splitlines()
            if line.startswith("stoker") or not line.endswith(" ...")
        ]
        if not lines:
            found.append("silent: exit code 2 without a message")
        elif len(lines) > _LINES or len(outcome.error) > _CHARACTERS:
            found.append(f"message: {len(lines)} lines, {len(outcome.error)} characters")
        elif control := _CONTROL.search(outcome.error):
            found.append(f"message: control character {control[0]!r} reaches the terminal")
    found += [f"leftover: {name}" for name in outcome.left]
    return found


def chance_of(seed: int, kind: str, number: int) -> random.Random:
    """The random generator of one case. It depends on no other case, so that the case can be run alone."""
    return random.Random(f"{seed}/{kind}/{number}")


def seed_of_tests() -> int:
    """$STOKER_ATTACK_SEED; without it always the same, so that a test that passed before a change fails only by the change."""
    return int(os.environ.get("STOKER_ATTACK_SEED") or 20260101)


def seed_of_today() -> int:
    """$STOKER_ATTACK_SEED, or the date."""
    return int(os.environ.get("STOKER_ATTACK_SEED") or time.strftime("%Y%m%d", time.gmtime()))
