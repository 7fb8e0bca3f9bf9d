"""Compares stock with Stoker on several cases, and checks that the losses are equal and that each ratio reaches its bar.

Losses are compared in a few steps of their own without dropout, whose random numbers differ between the sides. The timed steps
have the dropout that the model comes with. Sides take their steps in turn, each in a process of its own (benchmarks/sides.py).
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sides import Measured, Step, measure

__all__ = ["Bar", "Case", "cpu_name", "main"]

LOSS_STEPS = 2
TOLERANCE = 1e-3
"""How far the losses may be apart, as a share of stock's. After one step they contain the rounding of all gradients."""


@dataclass(frozen=True)
class Bar:
    """A ratio of medians that must be reached."""

    least: float
    base: str = "stock"
    """The side that "stoker" is compared with."""

    def text(self, results: dict[str, Measured]) -> tuple[str, bool]:
        """The measured ratio beside the bar, and whether it is reached. Both have two digits."""
        ratio = round(results["stoker"].faster_than(results[self.base]), 2)
        reached = ratio >= self.least
        return f"{ratio:.2f} against {self.base}; bar {self.least:.2f}: {'reached' if reached else 'MISSED'}", reached


@dataclass(frozen=True)
class Case:
    title: str
    stock: Callable[..., Step]
    """Takes `dropout`; must be picklable, as all sides."""
    stoker: Callable[..., Step]
    bars: tuple[Bar, ...]
    products: Callable[[], Step] | None = None
    repeat: int = 1
    """How many steps are taken for each that is asked for, where a step takes less than a second."""

    def sides(self) -> dict[str, Callable[[], Step]]:
        found: dict[str, Callable[[], Step]] = {"stock": self.stock, "stoker": self.stoker}
        return {**found, "products alone": self.products} if self.products else found


def cpu_name() -> str:
    from stoker.machine import this_machine

    machine = this_machine()
    return f"{machine.model.name or machine.model.architecture}, {len(machine.usable_cores)} cores"


def losses_differ(case: Case) -> tuple[dict[str, list[float]], str]:
    """The losses of both sides without dropout, and what is wrong with them."""
    sides = {
        name: functools.partial(build, dropout=False)
        for name, build in (("stock", case.stock), ("stoker", case.stoker))
    }
    results = measure(sides, LOSS_STEPS, 0, lambda line: None)
    losses = {name: measured.losses for name, measured in results.items()}
    notes = [f"{name}: {measured.note}" for name, measured in results.items() if measured.note]
    equal = not notes and all(
        math.isclose(mine, theirs, rel_tol=TOLERANCE) for mine, theirs in zip(*losses.values(), strict=True)
    )
    return losses, "" if equal else "; ".join(notes) or f"the losses differ by more than {TOLERANCE:g}"


def compare(case: Case, steps: int, warm_up: int) -> tuple[dict[str, Any], list[str]]:
    """The figures of a case, and what is wrong with them."""
    print(case.title, flush=True)
    losses, wrong = losses_differ(case)
    shown = "; ".join(f"{name} {', '.join(f'{loss:.5f}' for loss in found)}" for name, found in losses.items())
    print(f"  losses without dropout: {shown}: {wrong or 'equal'}", flush=True)
    faults = [wrong] if wrong else []
    results = measure(case.sides(), steps * case.repeat, warm_up * case.repeat, lambda line: print(line, flush=True))
    for name, measured in results.items():
        memory = measured.peak_bytes / max(1, results["stock"].peak_bytes)
        print(f"  {name:16}{measured.median:9.3f} s{memory:8.2f} of stock's memory  {measured.note}")
    for bar in case.bars:
        text, reached = bar.text(results)
        print(f"  {text}", flush=True)
        faults += [] if reached else [text]
    figures = {name: measured.to_dict() for name, measured in results.items()}
    return {"title": case.title, "losses_without_dropout": losses, "sides": figures}, faults


def main(cases: dict[str, Callable[[Path], Case]], description: str) -> None:
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--case", action="append", choices=list(cases), help="default: all of them")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=1, help="steps of each side before the timed ones (default 1)")
    parser.add_argument("--data", type=Path, default=Path(__file__).resolve().parents[2] / "shared" / "data")
    parser.add_argument("--out", type=Path, help="file for the figures as JSON")
    arguments = parser.parse_args()
    print(cpu_name(), flush=True)
    everything, faults = {}, []
    for name in arguments.case or list(cases):
        figures, wrong = compare(cases[name](arguments.data), arguments.steps, arguments.warm_up)
        everything[name] = figures
        faults += [f"{name}: {one}" for one in wrong]
        if arguments.out:  # after every case, so that an interrupted run is not lost
            found = {"cpu": cpu_name(), "cpus": os.cpu_count(), "cases": everything}
            arguments.out.write_text(json.dumps(found, indent=1))
    if faults:
        raise SystemExit("\n".join(faults))
