"""`stoker doctor`: the facts about this computer, its software, what it reaches, and what to do about it."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

from stoker import __version__
from stoker.cli import parsing
from stoker.errors import UserError
from stoker.machine import Machine, load, page, rates, software
from stoker.machine.peak import peak_gflops
from stoker.machine.verdicts import Evidence, verdicts

__all__ = ["main"]

_SECONDS = 9.0  # for everything: a page that takes longer is not waited for
_RATES_SECONDS = (2.0, 6.0)

_EXAMPLES = """examples:
  stoker doctor                          a page to read
  stoker doctor --json | jq .verdicts    the same for scripts
  stoker doctor --fresh                  measure again, on a quiet machine
"""


def main(argv: list[str]) -> int:
    parser = parsing.Parser("doctor", "what this computer can do, and what holds it back", examples=_EXAMPLES)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a page")
    parser.add_argument("--fresh", action="store_true", help="measure the rates again instead of using the kept ones")
    parser.add_argument("--no-rates", action="store_true", help="measure nothing")
    parser.add_argument(
        "--root", default="/", type=parsing.path, metavar="DIR", help="read a copy of another machine's /proc and /sys"
    )
    options = parser.parse_args(argv)
    if options.fresh and options.no_rates:
        raise UserError("--fresh and --no-rates contradict each other; leave one of them out")
    live = os.path.abspath(options.root) == "/"
    if not live and not os.path.isdir(os.path.join(options.root, "proc")):
        raise UserError(f"--root {options.root!r} holds no copy of a machine: there is no directory proc in it")
    if not live and options.fresh:
        raise UserError("--fresh cannot measure another machine; leave out --root")

    evidence, notes = _look(options.root, fresh=options.fresh, measure=live and not options.no_rates)
    if options.json:
        print(json.dumps(_as_json(evidence, notes), indent=2))
    else:
        found = (evidence.machine, evidence.software, evidence.rates, verdicts(evidence), notes)
        page.print_page(Console(highlight=False), page.doctor_page(*found))
    return 0


def _look(root: str, *, fresh: bool, measure: bool) -> tuple[Evidence, tuple[str, ...]]:
    # Before torch: with OMP_PROC_BIND its runtime narrows the affinity mask, and its import is load of our own.
    begin = time.perf_counter()
    machine = Machine.read(root)
    if os.path.abspath(root) != "/":
        return Evidence(machine), ()
    with _progress() as step:
        step("looking around")
        busy = load.watch()
        installed = software.read_software()
        measured, note = None, None
        if measure and installed.torch:
            measured = None if fresh else rates.known(machine)
            quiet = busy is None or not busy.disturbs
            if measured is None or (measured.disturbed and quiet):
                left = _SECONDS - (time.perf_counter() - begin)
                measured = rates.measure(
                    machine,
                    clock=_clock,
                    progress=lambda name: step(f"measuring {name}"),
                    seconds=min(max(left, _RATES_SECONDS[0]), _RATES_SECONDS[1]),
                )
                note = rates.forgotten_reason(machine, measured)
    evidence = Evidence(machine, installed, measured, busy, dict(os.environ))
    return evidence, (note,) if note else ()


def _clock(threads: int) -> float | None:
    """The clock of busy cores as the native library measures it; None without the library."""
    from stoker.kernels import native

    ghz = ctypes.c_double()
    try:
        native.function("stoker_clock", "pi")(ctypes.addressof(ghz), threads)
    except (native.NativeLibraryError, AttributeError, OSError):
        return None
    return ghz.value or None


@contextmanager
def _progress() -> Iterator[rates.Progress]:
    """Shows on stderr what is going on, in a terminal only; stdout stays for the page."""
    if not sys.stderr.isatty():
        yield lambda step: None
        return
    columns = (SpinnerColumn(), BarColumn(bar_width=24), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(rates.STEPS) + 1)

        def step(name: str) -> None:
            if progress.tasks[0].description:
                progress.advance(task)
            progress.update(task, description=name)

        yield step


def _as_json(evidence: Evidence, notes: tuple[str, ...]) -> dict[str, object]:
    machine, measured = evidence.machine, evidence.rates
    figures: dict[str, object] | None = None
    if measured:
        figures = dataclasses.asdict(measured)
        for dtype, reached in (("fp32", measured.fp32_all), ("bf16", measured.bf16_all)):
            peak = peak_gflops(machine, dtype, measured.threads, measured.clock_all or machine.model.nominal_ghz)
            figures[f"{dtype}_peak"] = peak
            figures[f"{dtype}_reached"] = reached / peak if peak else None
    return {
        "stoker": __version__,
        "machine": machine.to_dict(),
        "software": dataclasses.asdict(evidence.software) if evidence.software else None,
        "load": dataclasses.asdict(evidence.load) if evidence.load else None,
        "rates": figures,
        "verdicts": [dataclasses.asdict(verdict) for verdict in verdicts(evidence)],
        "notes": list(notes),
    }
