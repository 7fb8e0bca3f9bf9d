"""The rates of this machine for commands that need them: measured once on a quiet machine, and stored."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from stoker.machine.rates import Rates

__all__ = ["machine_rates"]


def machine_rates(log_line: Callable[[str], None]) -> Rates:
    """The machine's rates: measured the first time, and again as soon as they can be measured better.

    Rates that were measured while other programs ran are too low. Until none does, each run checks one of their products for
    half a second; then all are measured again, because an estimate of time also needs the memory bandwidth.
    """
    from stoker.kernels.clock import clock_ghz
    from stoker.machine import load, rates, this_machine
    from stoker.machine.measure import measure_rates, remeasure

    machine = this_machine()
    known = rates.known(machine)
    if known is not None and not known.disturbed:
        return known
    if known is not None and ((busy := load.current_load()) is None or busy.disturbs):
        return remeasure(machine, known, clock=clock_ghz)
    why = "once" if known is None else "again, because other programs ran the first time"
    log_line(f"measuring this machine's peak rates ({why}; 6 seconds)")
    found = measure_rates(machine, clock=clock_ghz)
    if known is not None:
        found = dataclasses.replace(found, step=known.step)
    rates.save(machine, found)
    return found
