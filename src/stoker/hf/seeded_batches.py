"""Random numbers of data sets and collators that depend on the batch alone, so that a resumed run draws them again.

A masked-LM collator draws random numbers for every batch. Drawn from the generators of training, they would depend on how many
batches were loaded ahead, on the loader's workers, and on whether the run was resumed. Here each batch is loaded with all
generators seeded from (seed, epoch, rank, number of the batch), and those of training are left as they were.
"""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from stoker.hf.checkpointing import random_state
from stoker.requires import supported

__all__ = ["BatchSeeds", "indices_of", "seed_batches"]

_SPARE = np.random.MT19937(0)
"""Takes the place of NumPy's global generator while a batch is being loaded."""
_LONGEST = 64  # of lists in which generators are looked for; longer ones are data


class BatchSeeds:
    """The seeds of a loader's batches. Its workers have copies, which share the epoch."""

    def __init__(self, seed: int, rank: int = 0) -> None:
        self.seed, self.rank = seed, rank
        self._epoch = torch.zeros(1, dtype=torch.int64)
        self._counted = (-1, 0)
        """Epoch, and batches of it that this process has collated, where batches carry no numbers."""
        self._facts = ""
        """What the random numbers of the batch being loaded depend on."""
        self._training: Any = None
        """The state of the generators in training, while a batch is being loaded; None otherwise."""

    def share(self) -> None:
        """Before workers are started, which may outlive an epoch."""
        self._epoch.share_memory_()  # type: ignore[no-untyped-call]

    def set_epoch(self, epoch: int) -> None:
        self._epoch[0] = epoch

    @property
    def loading(self) -> bool:
        return self._training is not None

    def begin(self, number: int | None) -> None:
        """Seeds the generators for a batch, or for the next one if it carries no number."""
        worker = None
        if number is None:
            number, worker = self._next(), get_worker_info()
        if not self.loading:
            self._training = random.getstate(), random_state.numpy_generator(), torch.random.get_rng_state()
        self._facts = repr((self.seed, int(self._epoch), self.rank, number, worker and worker.id))
        value = _hashed(self._facts)
        random.seed(value)
        random_state.use_numpy_generator(_SPARE)
        np.random.seed(value & 0xFFFFFFFF)
        torch.random.default_generator.manual_seed(value)

    def seed_own(self, generators: list[tuple[Any, str]]) -> None:
        """Seeds the generators that a data set or collator holds itself."""
        for generator, salt in generators:
            value = _hashed(f"{self._facts} {salt}")
            if isinstance(generator, torch.Generator):
                generator.manual_seed(value)
            elif isinstance(generator, np.random.Generator):
                generator.bit_generator.state = type(generator.bit_generator)(value).state
            else:
                generator.seed(value & 0xFFFFFFFF)

    def end(self) -> None:
        """The generators continue where training left them."""
        python, numpy, torchs = self._training
        self._training = None
        random.setstate(python)
        random_state.use_numpy_generator(numpy)
        torch.random.set_rng_state(torchs)

    def _next(self) -> int:
        """Numbers batches in the order in which this process collates them; a resumed run collates skipped ones, too."""
        epoch, count = self._counted
        self._counted = (int(self._epoch), count + 1 if epoch == int(self._epoch) else 0)
        return self._counted[1]


def _hashed(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def seed_batches(loader: Any, seeds: BatchSeeds) -> BatchSeeds:
    """Makes `loader` draw random numbers by batch, in place: it may be wrapped by accelerate, and callbacks may hold it.

    Returns the seeds that it uses: those of the first call, if this is not the first.
    """
    loader = getattr(loader, "base_dataloader", loader)  # inside accelerate's
    if not supported("Trainer: random collators") or not isinstance(loader, DataLoader):
        return seeds
    if isinstance(loader.collate_fn, _SeededCollator):
        return loader.collate_fn.seeds
    if loader.num_workers:
        seeds.share()
    loader.collate_fn = _SeededCollator(loader.collate_fn, seeds)
    if loader.batch_sampler is not None and not isinstance(loader.dataset, IterableDataset):
        # torch refuses to replace these by assignment, because their sizes could change; here they do not.
        vars(loader).update(
            dataset=_SeededRows(loader.dataset, seeds), batch_sampler=_NumberedBatches(loader.batch_sampler)
        )
    return seeds


class _Wrapper:
    """Passes on what it does not have itself: users and libraries look for attributes of the wrapped object."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_inner":  # a copy in another process has no `_inner` yet
            raise AttributeError(name)
        return getattr(self._inner, name)


class _Numbered(NamedTuple):
    number: int
    indices: Any


def indices_of(batch: Any) -> Any:
    """The indices of a batch of a loader's sampler, which may have been given a number."""
    return batch.indices if isinstance(batch, _Numbered) else batch


class _NumberedBatches(_Wrapper):
    """A batch sampler whose batches carry their numbers, also to the workers of a loader."""

    def __iter__(self) -> Iterator[_Numbered]:
        return (_Numbered(number, indices) for number, indices in enumerate(self._inner))

    def __len__(self) -> int:
        return len(self._inner)


class _SeededRows(_Wrapper, Dataset[Any]):
    """A data set that reads the rows of a numbered batch with seeded generators."""

    def __init__(self, dataset: Any, seeds: BatchSeeds) -> None:
        super().__init__(dataset)
        self._seeds = seeds
        self._own = own_generators(dataset)

    def __len__(self) -> int:
        return len(self._inner)

    def __getitem__(self, index: Any) -> Any:
        return self._inner[index]

    def __getitems__(self, batch: Any) -> Any:
        # Called by _MapDatasetFetcher in torch.utils.data._utils with what the batch sampler yields.
        if not isinstance(batch, _Numbered):
            return self._read(batch)
        self._seeds.begin(batch.number)
        try:
            self._seeds.seed_own(self._own)
            return self._read(batch.indices)
        except BaseException:  # else the collator, which is called next, ends it
            self._seeds.end()
            raise

    def _read(self, indices: Any) -> Any:
        several = getattr(self._inner, "__getitems__", None)
        return [self._inner[index] for index in indices] if several is None else several(indices)


class _SeededCollator(_Wrapper):
    """A collator that draws seeded numbers."""

    def __init__(self, collate: Any, seeds: BatchSeeds) -> None:
        super().__init__(collate)
        self.seeds = seeds
        self._own = own_generators(collate)

    def __call__(self, rows: Any) -> Any:
        if not self.seeds.loading:
            self.seeds.begin(None)
        try:
            self.seeds.seed_own(self._own)
            return self._inner(rows)
        finally:
            self.seeds.end()


def own_generators(thing: Any) -> list[tuple[Any, str]]:
    """The generators that a data set or collator holds, each with a text that stands for the seed its owner gave it.

    Looked for in its attributes, and in those of the functions and data sets that it wraps.
    """
    found: dict[int, tuple[Any, str]] = {}
    left, seen = [thing], {id(thing)}
    while left:
        for part in _parts(left.pop()):
            if id(part) in seen:
                continue
            seen.add(id(part))
            if (state := _state(part)) is not None:
                found[id(part)] = part, hashlib.sha256(state).hexdigest()[:16]
            elif isinstance(part, Dataset) or (callable(part) and not isinstance(part, type | nn.Module)):
                left.append(part)
    return list(found.values())


def _state(generator: Any) -> bytes | None:
    """The state of a generator; None for anything else."""
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, np.random.Generator):
        return repr(generator.bit_generator.state).encode()
    if isinstance(generator, np.random.RandomState):
        return repr(generator.get_state(legacy=False)).encode()
    return repr(generator.getstate()).encode() if isinstance(generator, random.Random) else None


def _parts(one: Any) -> list[Any]:
    if isinstance(one, functools.partial):
        return [one.func, *one.args, *one.keywords.values()]
    owner = getattr(one, "__self__", one)  # of a method
    # transformers' collators make their generator in the first call, from their `seed`.
    if hasattr(owner, "create_rng") and getattr(owner, "seed", None) is not None and owner.generator is None:
        owner.create_rng()
    held = [] if isinstance(owner, ModuleType) else [*getattr(owner, "__dict__", {}).values()]
    held += [cell.cell_contents for cell in getattr(one, "__closure__", None) or () if _is_filled(cell)]
    lists = [part for part in held if isinstance(part, list | tuple | dict) and len(part) <= _LONGEST]
    return held + [item for part in lists for item in (part.values() if isinstance(part, dict) else part)]


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
