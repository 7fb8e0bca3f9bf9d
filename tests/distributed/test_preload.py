"""A process that waits to replace a rank imports what the rank has imported, with the rank's environment, and leaves no trace."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from stoker.distributed.preload import Preload
from stoker.hf.secrets import is_secret


def test_only_installed_modules_are_listed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    own = ModuleType("a_module_of_the_script")
    own.__file__ = str(tmp_path / "a_module_of_the_script.py")
    monkeypatch.setitem(sys.modules, own.__name__, own)
    found = Preload.of_this_process(is_secret).modules
    assert {"json", "pytest", "stoker.distributed.preload"} <= set(found)
    assert not {"__main__", "a_module_of_the_script"} & set(found)
    assert len(set(found)) == len(found)


def test_variables_that_the_rank_has_set_are_passed_on_but_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    found = Preload.of_this_process(is_secret).environment
    assert found["HF_HUB_OFFLINE"] == "1"
    assert "HF_TOKEN" not in found


def test_it_is_written_once_and_read_by_the_keeper(tmp_path: Path) -> None:
    assert Preload.read(tmp_path, 3) is None
    first = Preload(["json"], {"A": "1"})
    first.write(tmp_path, 3)
    Preload(["torch"], {}).write(tmp_path, 3)  # of a process that replaced the rank
    assert Preload.read(tmp_path, 3) == first
    assert Preload.read(tmp_path, 2) is None


def test_modules_see_the_environment_of_the_rank_which_is_restored(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "reads_a_variable.py").write_text("import os\nSEEN = os.environ['STOKER_SOME_VARIABLE']\n")
    (tmp_path / "raises.py").write_text("raise RuntimeError\n")
    (tmp_path / "comes_later.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = dict(os.environ)
    wanted = iter([True, True, True, False])
    Preload(["raises", "nowhere_at_all", "reads_a_variable", "comes_later"], {"STOKER_SOME_VARIABLE": "x"}).load(
        lambda: next(wanted)
    )
    assert sys.modules.pop("reads_a_variable").SEEN == "x"
    assert "comes_later" not in sys.modules
    assert dict(os.environ) == before
