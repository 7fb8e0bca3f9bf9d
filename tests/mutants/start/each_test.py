"""A plugin of pytest: what a test executes is recorded for every test anew (../reach.py)."""

from __future__ import annotations

import sys

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    sys.modules["stoker_reach"].new_test()
