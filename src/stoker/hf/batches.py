"""Batches by number of tokens, or of similar length, in an order that depends on seed and epoch alone.

A resumed run can reproduce that order: it asks for the same epoch and skips the batches that were trained.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["EpochBatches", "Position", "lengths_of"]

_POOL = 50  # batches sorted together when similar lengths are asked for; larger pools make the order less random


class EpochBatches:
    """A batch sampler with a number of `rows` or of `tokens` per batch; `similar` puts rows of similar length together.

    With several processes, each gets every `world_size`-th batch, and all get the same number of batches.
    """

    def __init__(
        self,
        lengths: Sequence[int] | NDArray[np.integer[Any]],
        *,
        rows: int | None = None,
        tokens: int | None = None,
        similar: bool = False,
        shuffle: bool = True,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if (rows is None) == (tokens is None):
            raise ValueError("EpochBatches: give either rows or tokens")
        self.lengths = np.asarray(lengths, np.int64)
        if tokens is not None and len(self.lengths) and tokens < int(self.lengths.max()):
            raise ValueError(
                f"tokens_per_batch is {tokens}, but one row alone has {int(self.lengths.max())} tokens; "
                "raise it, or shorten rows by max_seq_length"
            )
        self.rows, self.tokens, self.similar, self.shuffle = rows, tokens, similar, shuffle
        self.seed, self.rank, self.world_size = seed, rank, world_size
        self.epoch = 0
        # By tokens, epochs would differ in their number of batches; trainers plan with one number, so the first epoch sets it.
        first = self._cut(self._order())
        self._count = -(-len(first) // world_size) * world_size
        self._first = self._even(first)
        self._made = (0, self._first)

    @classmethod
    def from_arguments(cls, args: Any, dataset: Any, *, tokens: int | None, similar: bool) -> EpochBatches:
        """The batches of this rank, by the TrainingArguments `args`; ValueError if a row has more than `tokens` tokens."""
        return cls(
            lengths_of(dataset, args.length_column_name),
            rows=None if tokens else args.train_batch_size,
            tokens=tokens,
            similar=similar,
            seed=args.seed if args.data_seed is None else args.data_seed,
            rank=args.process_index,
            world_size=args.world_size,
        )

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        yield from self._batches()[self.rank :: self.world_size]

    def __len__(self) -> int:
        return len(self._batches()) // self.world_size

    def _batches(self) -> list[list[int]]:
        if self._made[0] != self.epoch:
            self._made = (self.epoch, self._even(self._cut(self._order())))
        return self._made[1]

    def _order(self) -> NDArray[np.int64]:
        random = np.random.default_rng([self.seed, self.epoch])
        order = random.permutation(len(self.lengths)) if self.shuffle else np.arange(len(self.lengths))
        if not self.similar:
            return order
        if self.rows is not None:
            pool = self.rows * _POOL
        else:
            pool = max(int(_POOL * (self.tokens or 1) / max(self.lengths.mean(), 1)), 1)
        parts = [order[i : i + pool] for i in range(0, len(order), pool)]
        parts = [part[np.argsort(-self.lengths[part], kind="stable")] for part in parts]
        return np.concatenate(parts) if parts else order

    def _cut(self, order: NDArray[np.int64]) -> list[list[int]]:
        batches: list[list[int]] = []
        batch: list[int] = []
        total = 0
        for index in order.tolist():
            length = int(self.lengths[index])
            full = len(batch) == self.rows if self.rows is not None else total + length > (self.tokens or 0)
            if batch and full:
                batches.append(batch)
                batch, total = [], 0
            batch.append(index)
            total += length
        if batch:
            batches.append(batch)
        if self.similar and self.shuffle:
            np.random.default_rng([self.seed, self.epoch, 1]).shuffle(batches)
        return batches

    def _even(self, batches: list[list[int]]) -> list[list[int]]:
        """As many batches as in the first epoch, the same number for each process: large batches are split, small ones merged."""
        batches = self._spread(batches) if len(batches) > self._count else list(batches)
        while len(batches) < self._count:
            largest = max(range(len(batches)), key=lambda i: len(batches[i]))
            batch = batches[largest]
            if len(batch) < 2:
                batches.append(batches[0])  # fewer rows than processes: one is trained twice
                continue
            batches[largest : largest + 1] = [batch[: len(batch) // 2], batch[len(batch) // 2 :]]
        return batches

    def _spread(self, batches: list[list[int]]) -> list[list[int]]:
        """Reduces `batches` to at most `_count`, none with more than `tokens` tokens.

        The emptiest are dissolved and their rows put where there is room. If that is not enough, more and more of the
        emptiest are refilled, up to all of them. If no such packing is found, the first epoch's batches serve in another order.
        """
        emptiest = sorted(range(len(batches)), key=lambda i: int(self.lengths[batches[i]].sum()))
        gone, again = len(batches) - self._count, 0
        while again <= self._count:
            apart = emptiest[: gone + again]
            dropped, anew = set(apart[:gone]), set(apart)
            spread = [[] if i in anew else list(batch) for i, batch in enumerate(batches) if i not in dropped]
            if self._fill(spread, [row for i in apart for row in batches[i]]):
                return [batch for batch in spread if batch]
            if again == self._count:
                break
            again = min(2 * again or 1, self._count)
        order = np.random.default_rng([self.seed, self.epoch, 2]).permutation(self._count)
        return [self._first[i] for i in order.tolist()]

    def _fill(self, batches: list[list[int]], rows: list[int]) -> bool:
        """Puts every row, the longest first, into the batch that it fills best; False if one fits nowhere."""
        rooms = sorted(((self.tokens or 0) - int(self.lengths[batch].sum()), i) for i, batch in enumerate(batches))
        for row in sorted(rows, key=lambda row: -self.lengths[row]):
            length = int(self.lengths[row])
            at = bisect_left(rooms, (length, -1))
            if at == len(rooms):
                return False
            room, i = rooms.pop(at)
            batches[i].append(row)
            insort(rooms, (room - length, i))
        return True


@dataclass
class Position:
    """Which batch is being computed. The Trainer's callback updates it."""

    epoch: int = 0
    epoch_began_at: int = 0
    """The global step at which this process began the epoch."""
    micro_batch: int = 0
    """Batches of the current step that are done (gradient accumulation)."""

    def in_epoch(self, batches: int, args: Any, step: int) -> tuple[int, int]:
        """The epoch, and the number of the batch within it, after `step` steps of epochs with so many `batches`."""
        accumulation = args.gradient_accumulation_steps
        epoch, update = self.epoch, step - self.epoch_began_at
        if not args.ignore_data_skip:
            epoch, update = divmod(step, max(-(-batches // accumulation), 1))
        return epoch, update * accumulation + self.micro_batch


def lengths_of(dataset: Any, column: str = "length") -> NDArray[np.int64]:
    """The number of tokens of each row: `dataset.lengths` or the column if there is one, else counted."""
    known = getattr(dataset, "lengths", None)
    if known is not None:
        return np.asarray(known, np.int64)
    if column in (getattr(dataset, "column_names", None) or ()):
        return np.asarray(dataset[column], np.int64)
    return np.fromiter((len(dataset[i]["input_ids"]) for i in range(len(dataset))), np.int64, len(dataset))
