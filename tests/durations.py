"""What tests took when they were last measured (tests/durations.json, written by `make durations`), to start the longest first.

Of each file: tests of half a second and more by name, and all others together under "". A file that is not listed is taken for
a short one, so nobody needs to measure for a new test.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

PATH = Path(__file__).with_name("durations.json")
LISTED = 0.5


def of_files(nodeids: Iterable[str]) -> Counter[str]:
    """Seconds that the tests in each file take."""
    stored = json.loads(PATH.read_text()) if PATH.exists() else {}
    found: Counter[str] = Counter()
    for nodeid in nodeids:
        file, _, test = nodeid.partition("::")
        of_file = stored.get(file, {})
        found[file] += of_file.get(test, 0.0)
    for file in found:
        found[file] += stored.get(file, {}).get("", 0.0)
    return found


class Recorder:
    """Adds up what each test took, with its fixtures, and stores it at the end. Files that were not run keep their times."""

    def __init__(self) -> None:
        self._taken: dict[str, Counter[str]] = defaultdict(Counter)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file, _, test = report.nodeid.partition("::")
        self._taken[file][test] += report.duration

    def pytest_sessionfinish(self) -> None:
        stored = json.loads(PATH.read_text()) if PATH.exists() else {}
        for file, taken in self._taken.items():
            long = {test: round(time, 1) for test, time in taken.items() if time >= LISTED}
            rest = sum(time for time in taken.values() if time < LISTED)
            stored[file] = {**stored.get(file, {}), "": round(rest, 1), **long}
        root = PATH.parents[1]
        kept = {file: dict(sorted(times.items())) for file, times in sorted(stored.items()) if (root / file).exists()}
        PATH.write_text(json.dumps(kept, indent=1) + "\n")
