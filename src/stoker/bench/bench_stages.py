"""The stages of `stoker bench`, how long each may take, and the lines that show where it is."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

from stoker.bench.bench_cases import CASES, Size
from stoker.english import duration

__all__ = ["FULL", "QUICK", "STAGES", "Budget", "Progress"]


@dataclass(frozen=True)
class Budget:
    """How long a run takes, and how large its models are."""

    size: Size
    rounds: tuple[int, int]
    """At least and at most of a comparison; a round is one step of every side."""
    seconds: dict[str, float]
    """Of timed steps, by stage; two thirds of a stage on a slow machine, as processes start and warm up besides."""
    megabytes: int
    """Of the large allreduce."""
    sweep_rounds: tuple[int, int]

    def expected(self, stage: str) -> float:
        """Seconds of the whole stage, until others have shown how fast this machine is."""
        return 1.5 * self.seconds[stage] + (10.0 if stage in CASES else 5.0)


STAGES = {
    "bert-qa": "BERT-base QA, stock against Stoker",
    "embeddings": "MiniLM embeddings, stock against Stoker",
    "lora": "SmolLM2 LoRA, stock against Stoker",
    "host": "host time of narrow models",
    "threads": "1 to all threads",
    "allreduce": "allreduce, gloo against ccl",
}
FULL = Budget(
    "full",
    (3, 40),
    {"bert-qa": 60.0, "embeddings": 40.0, "lora": 60.0, "host": 12.0, "threads": 110.0, "allreduce": 15.0},
    400,
    (2, 10),
)
QUICK = Budget(
    "quick",
    (3, 10),
    {"bert-qa": 7.0, "embeddings": 5.0, "lora": 6.0, "host": 2.0, "threads": 12.0, "allreduce": 2.0},
    100,
    (1, 3),
)


class Progress:
    """One line for each stage, and on a terminal one below it that shows what it is doing."""

    def __init__(self, stages: Sequence[str], budget: Budget, stream: TextIO) -> None:
        self._expected = {stage: budget.expected(stage) for stage in stages}
        self._stream = stream
        self._number = 0
        self._total = len(stages)
        self._began = time.monotonic()
        self._planned = self._spent = 0.0
        self._drawn = False

    def begin(self, stage: str) -> None:
        self._number += 1
        self._stage, self._began = stage, time.monotonic()
        self._line(f"[{self._number}/{self._total}] {STAGES[stage]} (about {self._left()} left)")

    def _left(self) -> str:
        """The time planned for the stages left, corrected by how long the finished ones took."""
        ratio = (self._spent + 20.0) / (self._planned + 20.0)
        left = ratio * sum(self._expected.values())
        return f"{round(left / 60.0)} min" if left >= 90.0 else f"{max(10 * round(left / 10.0), 10)} s"

    def now(self, text: str) -> None:
        if self._stream.isatty():
            print(f"\r\x1b[2K      {text[:70]}", end="", file=self._stream, flush=True)
            self._drawn = True

    def end(self, found: str) -> None:
        took = time.monotonic() - self._began
        self._planned += self._expected.pop(self._stage)
        self._spent += took
        self._line(f"      {found} ({duration(took)})")

    def note(self, text: str) -> None:
        self._line(f"      {text}")

    def _line(self, text: str) -> None:
        self.clear()
        print(text, file=self._stream, flush=True)

    def clear(self) -> None:
        if self._drawn:
            print("\r\x1b[2K", end="", file=self._stream, flush=True)
            self._drawn = False
