"""A padded batch seen as sequences of real tokens: which rows of the flattened batch are real, and where each sequence ends.

Made once per call at the base model's door; layers read the cumulative lengths from it, heads the mask. Packing takes the
real rows out of (batch, length, ...), unpacking lays packed rows out again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from stoker.model.class_swap import is_exporting

__all__ = [
    "Positions",
    "Sequences",
    "count",
    "counting",
    "current",
    "read_mask",
    "recomputed",
    "remember",
    "serving",
    "watched",
    "watching",
]


@dataclass(frozen=True, kw_only=True, eq=False)
class Sequences:
    """Where the real tokens of one padded batch are."""

    batch: int
    length: int
    cu_seqlens: Tensor
    """int32; packed row at which each sequence starts, and the end. Rows without a token have no sequence."""
    longest: int
    positions: Tensor
    """(tokens,) position of each packed row within its sequence."""
    index: Tensor | None
    """(tokens,) flat position in (batch * length) of each packed row; None: every position is kept."""
    mask: Tensor | None
    """(batch, length) bool, True at real tokens; None: no padding."""
    left: tuple[Tensor, Tensor] | None
    """Rows of the batch that begin with padding, and the packed row of their first token."""
    dtype: torch.dtype
    """Type of the activations inside the base model."""

    @property
    def tokens(self) -> int:
        return self.positions.shape[0]

    def pack(self, x: Tensor) -> Tensor:
        """(batch, length, ...) to (1, tokens, ...). A batch of one row, as position_ids may be, stands for all rows."""
        if x.dim() == 1:  # position_ids (length,), which stock broadcasts
            x = x.unsqueeze(0)
        if x.shape[0] != self.batch:
            x = x.expand(self.batch, *x.shape[1:])
        rows = x.reshape(self.batch * self.length, *x.shape[2:])
        return (rows if self.index is None else rows.index_select(0, self.index)).unsqueeze(0)

    def unpack(self, x: Tensor) -> Tensor:
        """(1, tokens, width) to (batch, length, width), zeros at padding.

        Where a row begins with padding, its first column shows its first token, because that is where heads and poolers
        look for it.
        """
        packed = rows = x.squeeze(0)
        if self.index is not None:
            rows = packed.new_zeros(self.batch * self.length, packed.shape[-1]).index_copy_(0, self.index, packed)
        if self.left is not None:
            at, first = self.left
            rows = rows.index_copy(0, at * self.length, packed.index_select(0, first))
        return rows.view(self.batch, self.length, -1)

    def positions_after(self, padding_idx: int, ids: Tensor | None) -> Tensor:
        """Positions as RoBERTa counts them: from padding_idx + 1, tokens equal to padding_idx neither counted nor placed."""
        if ids is None:
            return self.positions + (padding_idx + 1)
        real = ids.reshape(-1) != padding_idx
        if bool(real.all()):
            return self.positions + (padding_idx + 1)
        counted = real.cumsum(0)
        starts = torch.arange(self.tokens, device=ids.device) - self.positions
        before = (counted - real.long()).index_select(0, starts)
        return (counted - before) * real + padding_idx


def read_mask(
    mask: Tensor | None, batch: int, length: int, *, dtype: torch.dtype, device: torch.device
) -> Sequences | str:
    """The sequences of a batch, or the reason why it cannot be seen as such."""
    if mask is None or bool(mask.all()):
        ends = torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=device)
        positions = torch.arange(length, device=device).repeat(batch)
        return Sequences(
            batch=batch,
            length=length,
            cu_seqlens=ends,
            longest=length,
            positions=positions,
            index=None,
            mask=None,
            left=None,
            dtype=dtype,
        )
    real = mask.bool()
    lengths = real.sum(1)
    starts = real.int().argmax(1)
    columns = torch.arange(length, device=device)
    if not torch.equal(real, (columns >= starts[:, None]) & (columns < (starts + lengths)[:, None])):
        return "the attention mask has holes"
    if int(lengths.max()) == 0:
        return "the batch has no real token"
    index = real.reshape(-1).nonzero().squeeze(1)
    ends = _cumulative(lengths)
    positions = index % length - starts.repeat_interleave(lengths)
    padded_left = ((starts > 0) & (lengths > 0)).nonzero().squeeze(1)
    left = (padded_left, (ends[1:] - lengths)[padded_left]) if padded_left.numel() else None
    return Sequences(
        batch=batch,
        length=length,
        cu_seqlens=_cumulative(lengths[lengths > 0]).int(),
        longest=int(lengths.max()),
        positions=positions,
        index=index,
        mask=real,
        left=left,
        dtype=dtype,
    )


def _cumulative(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0))


# What the modules inside a base model see of the call they are part of. Context variables, because several threads may run
# a model at once; layers take the value into their arguments, because activation checkpointing calls them again later.
_SERVING: ContextVar[Sequences | None] = ContextVar("stoker_serving", default=None)
_WATCHED: ContextVar[list[Sequences] | None] = ContextVar("stoker_watched", default=None)


def current() -> Sequences | None:
    """The sequences of the base model call that is running, None outside of one."""
    # an exported model is the stock model, and torch.export cannot read context variables
    return None if is_exporting() else _SERVING.get()


_PACKED: WeakValueDictionary[int, Sequences] = WeakValueDictionary()
"""Cache of the sequences of packed rows that a layer was given, by the storage of the rows."""


def remember(x: Any, sequences: Sequences) -> None:
    """Lets `recomputed` know `x` (1, tokens, width) for what it is.

    Whoever wraps a layer or a whole encoder in torch's checkpoint keeps this tensor until backward, and gives it, or an alias
    of it, to the layer again when the door has long been left.
    """
    x.stoker_sequences = sequences  # lives as long as the tensor
    _PACKED[x.untyped_storage()._cdata] = sequences


def recomputed(x: Any) -> Sequences | None:
    """The sequences of `x` if these are packed rows that are run through again in the midst of a backward pass."""
    # Only there, because a storage's address is given out again when it is freed; a checkpoint's is not freed yet.
    if is_exporting() or not _PACKED or torch._C._current_graph_task_id() == -1:
        return None
    try:
        found = _PACKED.get(x.untyped_storage()._cdata)
    except NotImplementedError:  # a tensor of torch.func, which has no storage
        return None
    return found if found is not None and tuple(x.shape[:2]) == (1, found.tokens) else None


@contextmanager
def serving(sequences: Sequences) -> Iterator[None]:
    """Runs a base model's layers on `sequences`, and shows them to a head that watches."""
    token = _SERVING.set(sequences)
    try:
        yield
    finally:
        _SERVING.reset(token)
    if (seen := _WATCHED.get()) is not None:
        seen[:] = [sequences]


@contextmanager
def watched() -> Iterator[None]:
    """Within this block, `watching` gives the sequences of the last base model call."""
    token = _WATCHED.set([])
    try:
        yield
    finally:
        _WATCHED.reset(token)


def watching() -> Sequences | None:
    seen = None if is_exporting() else _WATCHED.get()
    return seen[0] if seen else None


@dataclass
class Positions:
    """Positions of batches, padding included, that optimised base models were given, and how many of them were computed."""

    given: int = 0
    computed: int = 0


_COUNT: ContextVar[Positions | None] = ContextVar("stoker_positions", default=None)


@contextmanager
def counting(positions: Positions) -> Iterator[None]:
    """Within this block, calls of optimised base models are added to `positions`."""
    token = _COUNT.set(positions)
    try:
        yield
    finally:
        _COUNT.reset(token)


def count(given: int, computed: int) -> None:
    """Tells whoever is `counting` of a call."""
    if (positions := _COUNT.get()) is not None:
        positions.given += given
        positions.computed += computed
