"""`stoker doctor`: facts about this computer and its software, measured rates, and advice."""

from __future__ import annotations

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
from stoker.errors import UserError, one_line
from stoker.machine import Machine, doctor_page, load, measure, rates, software
from stoker.machine.load import Load
from stoker.machine.peak import share_of_peak
from stoker.machine.rates import Rates, TrainingStep
from stoker.machine.verdicts import Evidence, verdicts

__all__ = ["main"]

_SECONDS = 9.0  # for everything except the training step; users do not wait longer for a page
_RATES_SECONDS = (2.0, 6.0)

_EXAMPLES = """examples:
  stoker doctor                          a page to read
  stoker doctor --json | jq .verdicts    the same for scripts
  stoker doctor --fresh                  measure again, on a quiet machine
"""


def main(argv: list[str]) -> int:
    parser = parsing.Parser("doctor", "what this computer can do, and what slows it down", examples=_EXAMPLES)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a page")
    parser.add_argument("--fresh", action="store_true", help="measure the rates again instead of using stored ones")
    parser.add_argument("--no-rates", action="store_true", help="do not measure rates")
    parser.add_argument(
        "--root", default="/", type=parsing.path, metavar="DIR", help="read a copy of another machine's /proc and /sys"
    )
    options = parser.parse_args(argv)
    if options.fresh and options.no_rates:
        raise UserError("--fresh and --no-rates contradict each other; leave one of them out")
    live = os.path.abspath(options.root) == "/"
    if not live and not os.path.isdir(os.path.join(options.root, "proc")):
        raise UserError(f"--root {options.root!r} is not a copy of a machine: it has no directory proc")
    if not live and options.fresh:
        raise UserError("--fresh cannot measure another machine; leave out --root")

    evidence, notes = _collect(options.root, fresh=options.fresh, with_rates=live and not options.no_rates)
    if options.json:
        print(json.dumps(_as_json(evidence, notes), indent=2))
    else:
        found = (evidence.machine, evidence.software, evidence.rates, verdicts(evidence), notes)
        doctor_page.print_page(Console(highlight=False), doctor_page.doctor_page(*found))
    return 0


def _collect(root: str, *, fresh: bool, with_rates: bool) -> tuple[Evidence, tuple[str, ...]]:
    # Before importing torch: with OMP_PROC_BIND its runtime narrows the affinity mask, and the import itself is load.
    begin = time.perf_counter()
    machine = Machine.read(root)
    if os.path.abspath(root) != "/":
        return Evidence(machine), ()
    with _progress() as step:
        step("reading the machine")
        busy = load.current_load()
        installed = software.read_software()
        found: Rates | None = None
        notes: list[str] = []
        if with_rates and installed.torch:
            kept = None if fresh else rates.known(machine)
            found = kept
            if found is None or _should_repeat(found, busy):
                found = _measure_rates(machine, step, _SECONDS - (time.perf_counter() - begin))
            if found.step is None or _disturbed(found.step, busy):
                step("measuring a training step")
                taken, note = _training_step(machine, found)
                found = dataclasses.replace(found, step=taken or found.step)
                notes += [note] if note else []
            if found != kept and (note := rates.save(machine, found)):
                notes.append(note)
    return Evidence(machine, installed, found, busy, dict(os.environ)), tuple(notes)


def _should_repeat(kept: Rates, busy: Load | None) -> bool:
    """Whether stored rates should be measured again: the machine is quiet now, or the clock can be measured now."""
    from stoker.kernels.clock import clock_ghz

    return _disturbed(kept, busy) or (kept.clock_all is None and clock_ghz(1) is not None)


def _disturbed(kept: Rates | TrainingStep, busy: Load | None) -> bool:
    """Whether other programs ran during the measurement and do not run now."""
    return kept.disturbed and not (busy and busy.disturbs)


def _measure_rates(machine: Machine, step: measure.Progress, left: float) -> Rates:
    from stoker.kernels.clock import clock_ghz

    return measure.measure_rates(
        machine,
        clock=clock_ghz,
        progress=lambda name: step(f"measuring {name}"),
        seconds=min(max(left, _RATES_SECONDS[0]), _RATES_SECONDS[1]),
    )


def _training_step(machine: Machine, found: Rates) -> tuple[TrainingStep | None, str | None]:
    """The step, or the reason why it could not be measured: the page is shown in any case."""
    try:
        from stoker.model.training_step import measure_training_step

        return measure_training_step(machine, found.fp32_all), None
    except Exception as error:
        return None, f"The training step in fp32 and bf16 could not be measured: {one_line(error).rstrip('.')}."


@contextmanager
def _progress() -> Iterator[measure.Progress]:
    """Shows progress on stderr if it is a terminal; stdout is for the page."""
    if not sys.stderr.isatty():
        yield lambda step: None
        return
    columns = (SpinnerColumn(), BarColumn(bar_width=24), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(measure.STEPS) + 2)

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
        for dtype in ("fp32", "bf16"):
            share = share_of_peak(machine, measured, dtype)
            believed = share if share and not share.disproved else None
            figures[f"{dtype}_peak"] = believed.peak if believed else None
            figures[f"{dtype}_reached"] = believed.reached if believed else None
        figures["peak_clock"] = "measured" if measured.clock_all else "nominal"
        figures["bf16_training_gain"] = measured.step.gain if measured.step else None
    return {
        "stoker": __version__,
        "machine": machine.to_dict(),
        "software": dataclasses.asdict(evidence.software) if evidence.software else None,
        "load": dataclasses.asdict(evidence.load) if evidence.load else None,
        "rates": figures,
        "verdicts": [dataclasses.asdict(verdict) for verdict in verdicts(evidence)],
        "notes": list(notes),
    }
