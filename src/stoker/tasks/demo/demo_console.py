"""What both demos print in the same way: the machine, headlines, and where the report is."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.text import Text

from stoker.machine.rates import Rates
from stoker.tasks import training_run

__all__ = ["console_on_stdout", "headline", "print_machine", "print_report"]


def console_on_stdout() -> Console:
    return Console(highlight=False, markup=False, soft_wrap=True)


def print_machine(console: Console) -> Rates:
    """Prints the machine with its rate, and returns its rates."""
    from stoker.machine import this_machine

    machine, rates = this_machine(), training_run.machine_rates(console.print)
    name = machine.model.name or "this CPU"
    console.print(f"{name}, {len(machine.usable_cores)} cores, {rates.fp32_all:.0f} GFLOP/s")
    return rates


def headline(console: Console, text: str) -> None:
    console.print(Text(f"\n{text}", style="bold"))


def print_report(console: Console, folder: Path) -> None:
    page = folder / "report.html"
    if page.exists():
        console.print(f"  report:      {page.resolve()}")
