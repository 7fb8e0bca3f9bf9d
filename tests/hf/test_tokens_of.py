"""The real tokens of rows are found however a data set stores them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from stoker.hf import distributed
from stoker.hf.distributed import tokens_of

LENGTHS = [3, 1, 7, 5]


class Rows:
    def __init__(self, *, masked: bool) -> None:
        self.masked = masked

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> dict[str, Any]:
        length = LENGTHS[index]
        if not self.masked:
            return {"input_ids": [1] * length}
        return {"input_ids": [1] * 8, "attention_mask": [1] * length + [0] * (8 - length)}


class Columns:
    """As the datasets library has it: slices of columns, formats, names."""

    column_names = ("input_ids", "attention_mask")

    def __len__(self) -> int:
        return len(LENGTHS)

    def with_format(self, kind: str, columns: list[str]) -> Columns:
        assert (kind, columns) == ("numpy", ["attention_mask"])
        return self

    def __getitem__(self, part: slice) -> dict[str, Any]:
        return {"attention_mask": np.array([[1] * n + [0] * (8 - n) for n in LENGTHS[part]])}


@pytest.mark.parametrize(
    "dataset", [Rows(masked=True), Rows(masked=False), Columns()], ids=["padded", "plain", "columns"]
)
def test_tokens_are_counted_without_padding(dataset: Any) -> None:
    found = tokens_of(dataset, "length")
    assert found is not None
    assert found.tolist() == LENGTHS


def test_reading_a_large_data_set_row_by_row_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "_LENGTHS_READ", 3)
    assert tokens_of(Rows(masked=True), "length") is None
