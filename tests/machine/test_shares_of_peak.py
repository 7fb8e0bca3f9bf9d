"""What doctor shows as a share of the peak is at most 100%, or says what else it is a share of."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from rich.console import Console

from stoker.machine import Machine
from stoker.machine.doctor_page import doctor_page, print_page
from stoker.machine.peak import share_of_peak
from stoker.machine.rates import Rates, TrainingStep

Recorded = Callable[[str], Machine]

# Genoa: 192 cores, 32 operations per cycle in fp32 and 64 in bf16, 14,746 and 29,491 GFLOP/s at 2.4 GHz.
RATES = Rates(192, 110.0, 16500.0, 220.0, 33000.0, 12.0, 700.0, 3.7, 3.1, "2.13.0", "2026-01-01T00:00:00Z", 6.0, False)


def shown(machine: Machine, rates: Rates) -> str:
    page = io.StringIO()
    print_page(Console(width=200, file=page), doctor_page(machine, None, rates, ()))
    return page.getvalue()


def unlabelled(page: str) -> list[int]:
    """Percentages without a word of what they are a share of, as in the column of shares of the peak."""
    return [int(found) for found in re.findall(r"(\d+)%(?! of nominal)", page)]


def test_shares_refer_to_the_clock_during_the_products(recorded: Recorded) -> None:
    machine = recorded("genoa")
    share = share_of_peak(machine, RATES, "fp32")
    assert share is not None
    assert (share.peak, share.nominal, share.disproved) == (pytest.approx(192 * 32 * 3.1), False, False)
    page = shown(machine, RATES)
    assert unlabelled(page) == [87, 87]
    assert "clock during the products 3.10 GHz, " in page


def test_bf16_has_a_clock_of_its_own(recorded: Recorded) -> None:
    page = shown(recorded("genoa"), replace(RATES, clock_bf16=2.8))
    assert unlabelled(page) == [87, 96]
    assert "clock during the products 3.10 GHz (2.80 GHz in bf16), " in page


def test_shares_of_the_nominal_peak_say_so(recorded: Recorded) -> None:
    genoa = recorded("genoa")
    nominal = replace(genoa, model=replace(genoa.model, nominal_ghz=2.4))
    page = shown(nominal, replace(RATES, clock_one=None, clock_all=None))
    assert page.count("112% of nominal") == 2
    assert "14,746 GFLOP/s nominal" in page
    assert unlabelled(page) == []


@pytest.mark.parametrize("ghz", [1.0, 2.0, 2.68, 2.685, 2.69, 2.7, 3.0])
def test_no_share_above_100_percent_is_shown_without_a_label(ghz: float, recorded: Recorded) -> None:
    machine, rates = recorded("genoa"), replace(RATES, clock_all=ghz)
    page = shown(machine, rates)
    assert all(share <= 100 for share in unlabelled(page))
    shares = [share_of_peak(machine, rates, dtype) for dtype in ("fp32", "bf16")]
    disproved = [share for share in shares if share and share.disproved]
    assert page.count("product exceeds the peak of") == len(disproved)
    assert len(unlabelled(page)) == 2 - len(disproved)
    assert bool(disproved) == (ghz < 2.67)


@pytest.mark.parametrize("name", ["ice_lake", "genoa", "sapphire_rapids_4"])
def test_the_page_shows_the_training_step(name: str, recorded: Recorded) -> None:
    step = TrainingStep(0.2134, 0.0423, 384, 2, 1536, 7, "0.1.0", "2026-01-01T00:00:00Z", False)
    page = shown(recorded(name), replace(RATES, step=step))
    assert "training step: fp32 213 ms, bf16 42.3 ms (2 BERT layers of width 384, 1,536 tokens, AdamW)" in page
