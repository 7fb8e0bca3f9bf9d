"""`after_import` calls its function when a module is complete, also if that module is being imported at the time."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from stoker.after_import import after_import

BODY = """
from stoker.after_import import after_import
import sys
after_import(__name__, lambda: seen.append(last))
seen = []
{middle}
last = "complete"
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_a_module_that_is_being_imported_is_waited_for(folder: Path) -> None:
    (folder / "half_way.py").write_text(BODY.format(middle="assert not seen"))
    module = importlib.import_module("half_way")
    assert module.seen == ["complete"]
    assert type(module.__spec__) is type(sys.__spec__)


def test_a_module_that_fails_calls_nothing_and_may_be_imported_again(folder: Path) -> None:
    file = folder / "fails_once.py"
    file.write_text(BODY.format(middle="raise ImportError('not now')"))
    with pytest.raises(ImportError, match="not now"):
        importlib.import_module("fails_once")
    file.write_text(BODY.format(middle="# a longer text, so that Python compiles it again"))
    assert importlib.import_module("fails_once").seen == ["complete"]


def test_before_and_after_the_import(folder: Path) -> None:
    (folder / "whole.py").write_text("value = 1\n")
    seen: list[int] = []
    after_import("whole", lambda: seen.append(sys.modules["whole"].value))
    assert seen == []
    importlib.import_module("whole")
    assert seen == [1]
    after_import("whole", lambda: seen.append(2))
    assert seen == [1, 2]
