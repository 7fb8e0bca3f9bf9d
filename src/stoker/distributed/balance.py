"""Batches that cost every rank the same: in padding-free training a step takes as long as the rank with the most tokens.

The examples of a global batch are the same as with torch's own sampler; only their assignment to ranks changes. Each rank gets
the same number of examples, assigned longest first to the rank with the fewest tokens so far.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import Sampler

__all__ = ["TokenBalancedSampler", "deal"]


def deal(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Positions of `lengths` per rank: equal numbers (up to one, the first ranks get the rest), nearly equal sums.

    Longest first to the lightest rank that still has room; ties go to the lower rank, so every rank computes the same assignment.
    """
    room = [len(lengths) // ranks + (rank < len(lengths) % ranks) for rank in range(ranks)]
    shares: list[list[int]] = [[] for _ in range(ranks)]
    weight = [0] * ranks
    for position in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        rank = min((r for r in range(ranks) if len(shares[r]) < room[r]), key=lambda r: (weight[r], r))
        shares[rank].append(position)
        weight[rank] += lengths[position]
    return [sorted(share) for share in shares]


class TokenBalancedSampler(Sampler[list[int]]):
    """A batch sampler for one rank: yields its examples of every global batch, which are balanced among the ranks.

    The order of an epoch is a permutation drawn from (seed, epoch), as in DistributedSampler. The last global batch may be
    short; it is dropped with `drop_last`, else its ranks differ by at most one example, and a rank that would get none gets
    the first example of the epoch so that all ranks take the same number of steps.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        batch_size: int,
        ranks: int,
        rank: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        sampler: Any = None,
    ) -> None:
        """`sampler` determines the order of examples, if given; if it has set_epoch, that is called for every epoch."""
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size} must be at least 1")
        if not 0 <= rank < ranks:
            raise ValueError(f"rank={rank} must be one of 0..{ranks - 1}")
        self.lengths = lengths
        self.batch_size = batch_size
        self.ranks = ranks
        self.rank = rank
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.sampler = sampler
        self.epoch = 0
        self.start = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "seed": self.seed}

    def load_state_dict(self, state: dict[str, int], *, steps: int = 0) -> None:
        """Resumes in the epoch of `state`, after `steps` of its global batches; the next epoch starts at its beginning."""
        self.epoch, self.seed, self.start = state["epoch"], state["seed"], steps

    def __len__(self) -> int:
        each = self.batch_size * self.ranks
        return len(self.lengths) // each if self.drop_last else -(-len(self.lengths) // each)

    def order(self) -> list[int]:
        """The examples of this epoch, in the order in which the global batches take them."""
        if self.sampler is not None:
            if hasattr(self.sampler, "set_epoch"):
                self.sampler.set_epoch(self.epoch)
            return list(self.sampler)
        if not self.shuffle:
            return list(range(len(self.lengths)))
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return torch.randperm(len(self.lengths), generator=generator).tolist()

    def weight(self, step: int) -> float:
        """The weight of this rank's mean loss in step `step` of an epoch, so that the mean over ranks is the mean over examples.

        It is 1 except in a short last batch, where ranks may have different numbers of examples, or none of their own.
        """
        total = min(len(self.lengths) - step * self.batch_size * self.ranks, self.batch_size * self.ranks)
        mine = total // self.ranks + (self.rank < total % self.ranks)
        return mine * self.ranks / total

    def __iter__(self) -> Iterator[list[int]]:
        order, each = self.order(), self.batch_size * self.ranks
        start, self.start = self.start, 0
        for step in range(start, len(self)):
            examples = order[step * each : (step + 1) * each]
            mine = deal([self.lengths[i] for i in examples], self.ranks)[self.rank]
            yield [examples[position] for position in mine] or [order[0]]
