"""Random numbers of data sets and collators depend on seed, epoch, rank and batch, and on nothing else."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator, skip_first_batches
from torch.utils.data import DataLoader, Dataset, IterableDataset

from stoker.hf.seeded_batches import BatchSeeds, own_generators, seed_batches


class Drawing(Dataset[Any]):
    """Rows that draw a number of each kind."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> list[float]:
        return [index, random.random(), np.random.rand(), float(torch.rand(()))]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        yield from range(23)


def collate(rows: list[Any]) -> tuple[Any, list[float]]:
    return rows, [random.random(), np.random.rand(), float(torch.rand(()))]


class WithGenerators:
    """A collator with generators of its own."""

    def __init__(self, seed: int) -> None:
        self.torch = torch.Generator().manual_seed(seed)
        self.numpy = np.random.default_rng(seed)
        self.old = np.random.RandomState(seed)
        self.python = random.Random(seed)

    def __call__(self, rows: list[Any]) -> list[float]:
        first = float(torch.rand((), generator=self.torch))
        return [first, self.numpy.random(), self.old.rand(), self.python.random()]


def batches(dataset: Any, epoch: int = 0, skip: int = 0, collate_fn: Any = collate, **options: Any) -> list[Any]:
    """What a run sees that begins this epoch after `skip` batches, whatever the state of the global generators."""
    prepare = options.pop("prepare", False)
    seeds = BatchSeeds(options.pop("seed", 1), options.pop("rank", 0))
    loader: Any = DataLoader(dataset, batch_size=4, collate_fn=collate_fn, **options)
    if prepare:
        loader = Accelerator(cpu=True).prepare_data_loader(loader)
    assert seed_batches(loader, seeds) is seeds
    seeds.set_epoch(epoch)
    return list(skip_first_batches(loader, skip) if skip else loader)


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"prepare": True}], ids=str)
def test_a_batch_has_the_same_random_numbers_after_skipping_others(options: dict[str, Any]) -> None:
    undisturbed = batches(Drawing(), epoch=1)
    before = random.getstate(), torch.get_rng_state()
    assert batches(Drawing(), epoch=1, skip=3, **options) == undisturbed[3:]
    if not options.get("num_workers"):
        assert random.getstate() == before[0], "loading does not advance the generators of training"
    drawn = [number for _, numbers in undisturbed for number in numbers]
    assert len(set(drawn)) == len(drawn)
    for other in ({"epoch": 0}, {"epoch": 1, "seed": 2}, {"epoch": 1, "rank": 1}):
        assert not {number for _, numbers in batches(Drawing(), **other) for number in numbers} & set(drawn)


def test_a_collator_of_a_stream_counts_the_batches() -> None:
    undisturbed = batches(Stream(), epoch=2)
    assert batches(Stream(), epoch=2, skip=2) == undisturbed[2:]
    workers = batches(Stream(), epoch=2, num_workers=2)
    assert batches(Stream(), epoch=2, num_workers=2) == workers
    assert len({numbers[0] for _, numbers in workers}) == len(workers), "workers draw different numbers"


def test_workers_that_outlive_an_epoch_learn_of_the_next() -> None:
    seeds = BatchSeeds(1)
    loader = DataLoader(Drawing(), batch_size=4, collate_fn=collate, num_workers=1, persistent_workers=True)
    seed_batches(loader, seeds)
    first = list(loader)
    seeds.set_epoch(1)
    assert list(loader) == batches(Drawing(), epoch=1) != first


def test_generators_of_a_collator_are_seeded_by_batch_and_by_their_own_seed() -> None:
    undisturbed = batches(range(23), collate_fn=WithGenerators(5))
    used = WithGenerators(5)
    assert batches(range(23), skip=2, collate_fn=used) == undisturbed[2:]
    inner = WithGenerators(5)
    assert batches(range(23), skip=2, collate_fn=lambda rows: inner(rows)) == undisturbed[2:]
    other = batches(range(23), collate_fn=WithGenerators(6))
    assert not {number for one in other for number in one} & {number for one in undisturbed for number in one}


def test_generators_are_found_in_collators_but_not_in_samplers() -> None:
    assert len(own_generators(WithGenerators(1))) == 4
    generator = torch.Generator()
    loader = DataLoader(Drawing(), shuffle=True, generator=generator)

    class Trainer:
        def __init__(self) -> None:
            self.loader = loader
            self.data_collator = WithGenerators(1)

        def collate(self, rows: Any) -> Any:
            return self.data_collator(rows)

    assert len(own_generators(Trainer().collate)) == 4
    assert own_generators(len) == []


def test_the_loader_of_a_second_training_keeps_its_seeds() -> None:
    loader = DataLoader(Drawing(), batch_size=4, collate_fn=collate)
    seeds = BatchSeeds(1)
    assert seed_batches(loader, seeds) is seeds
    assert seed_batches(loader, BatchSeeds(2)) is seeds
    assert len(loader) == 6
    assert loader.dataset[3][0] == 3
