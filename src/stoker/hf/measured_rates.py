"""The rates of this machine for commands that need them: measured the first time on a quiet machine, and checked in every run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from stoker.machine.rates import Rates

__all__ = ["machine_rates"]


def machine_rates(log_line: Callable[[str], None]) -> Rates:
    """The machine's rates: measured once, then checked for half a second in every run.

    Those that were measured while other programs ran are measured again as soon as none does. The check compares only one
    product, and an estimate of time also needs the memory bandwidth.
    """
    from stoker.kernels.clock import clock_ghz
    from stoker.machine import load, rates, this_machine
    from stoker.machine.measure import measure_rates, remeasure

    machine = this_machine()
    known = rates.known(machine)
    if known is not None and not (known.disturbed and (busy := load.current_load()) and not busy.disturbs):
        return remeasure(machine, known, clock=clock_ghz)
    why = "once" if known is None else "again, because other programs ran the first time"
    log_line(f"measuring this machine's peak rates ({why}; 6 seconds)")
    found = measure_rates(machine, clock=clock_ghz)
    if known is not None:
        found = dataclasses.replace(found, step=known.step)
    rates.save(machine, found)
    return found
