"""The rates of this machine for commands that need them: measured the first time, and checked in every run."""

from __future__ import annotations

from collections.abc import Callable

from stoker.machine.rates import Rates

__all__ = ["machine_rates"]


def machine_rates(log_line: Callable[[str], None]) -> Rates:
    """The machine's rates: measured once, then checked for half a second in every run."""
    from stoker.kernels.clock import clock_ghz
    from stoker.machine import rates, this_machine
    from stoker.machine.measure import measure_rates, remeasure

    machine = this_machine()
    if (known := rates.known(machine)) is not None:
        return remeasure(machine, known, clock=clock_ghz)
    log_line("measuring this machine's peak rates (once, 6 seconds)")
    found = measure_rates(machine, clock=clock_ghz)
    rates.save(machine, found)
    return found
