"""What the tests of several tasks start from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rig.plots import draw_once
from tasks.models import save_tiny_bert
from tasks.sentence_files import KINDS, rows_of, write_lines


@pytest.fixture(autouse=True, scope="module")
def _plots_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        draw_once(monkeypatch)
        yield


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny encoder."""
    return save_tiny_bert(tmp_path_factory.mktemp("tiny") / "bert")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A file for every kind of texts."""
    folder = tmp_path_factory.mktemp("rows")
    return {kind: write_lines(folder / f"{kind.replace(' ', '-')}.jsonl", rows_of(kind)) for kind in KINDS}
