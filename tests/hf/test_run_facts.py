"""The facts about the training data in a checkpoint: from rows of any kind, read once, without side effects."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hf import tiny
from stoker.hf.checkpointing import random_state, run_facts
from stoker.hf.checkpointing.run_facts import data_facts

RAGGED = [[[1, 2, 3], [4, 5]], [[6], [7, 8, 9]]]


@pytest.mark.parametrize(
    "ids",
    [RAGGED, [torch.ones(1, 6, dtype=torch.long)] * 2, [np.arange(4), np.arange(2)], [[torch.tensor(3)], (4, 5)]],
    ids=["choices of unequal lengths", "1 x L", "arrays", "tensors in lists"],
)
def test_rows_of_any_shape_are_distinguished(ids: list[Any]) -> None:
    rows = [{"input_ids": one} for one in ids]
    facts = data_facts(rows)
    assert facts["rows"] == 2
    assert facts == data_facts(rows)
    assert facts != data_facts([rows[0], {"input_ids": [99]}])


def test_lists_arrays_and_tensors_of_the_same_numbers_are_the_same_data() -> None:
    kinds = ([1, 2], np.array([1, 2]), torch.tensor([1, 2]), [np.int64(1), torch.tensor(2)])
    assert len({data_facts([{"input_ids": kind}])["sample"] for kind in kinds}) == 1


def test_default_reprs_do_not_change_the_dataset_fingerprint() -> None:
    class Picture:
        pass

    assert data_facts([{"image": Picture()}]) == data_facts([{"image": Picture()}])


class RandomRows(tiny.TinyData):
    """A different row on each read."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        token = int(torch.randint(10, 90, (1,))) + random.randrange(3) + np.random.randint(3)
        return {**super().__getitem__(index), "input_ids": [7, token]}


def test_random_rows_have_one_fingerprint_and_do_not_advance_the_generators() -> None:
    before = random_state.current()
    first = data_facts(RandomRows())
    torch.rand(3)
    assert data_facts(RandomRows()) == first
    assert "sample" in first
    with random_state.preserved(before):
        expected = torch.rand(2), random.random(), np.random.rand()
    with random_state.preserved(before):
        data_facts(RandomRows())
        found = torch.rand(2), random.random(), np.random.rand()
    assert torch.equal(found[0], expected[0])
    assert found[1:] == expected[1:]


class Broken(tiny.TinyData):
    def __getitem__(self, index: int) -> dict[str, Any]:
        raise OSError("gone")


def test_unreadable_data_is_described_by_its_number_of_rows() -> None:
    assert data_facts(Broken()) == {"rows": 64}
    assert data_facts(iter([])) == {}


def test_training_on_random_rows_reads_the_sample_once_and_resumes_without_a_warning(
    tree_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings: dict[str, Any] = {"max_steps": 4, "save_steps": 1}
    original, reads = run_facts.read_sample, []
    monkeypatch.setattr(run_facts, "read_sample", lambda *args: reads.append(args) or original(*args))
    tiny.trainer(tree_path, data=RandomRows(), **settings).train()
    assert len(reads) == 1
    with caplog.at_level("WARNING", logger="stoker"):
        tiny.trainer(tree_path, data=RandomRows(), **settings).train(
            resume_from_checkpoint=str(tree_path / "checkpoint-2")
        )
    assert "with other settings" not in caplog.text
