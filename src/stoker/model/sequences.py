"""The sequences of a padded batch: which positions hold real tokens, and where each sequence starts and ends.

A base model makes one `Sequences` per call. `pack` takes the real tokens out of (batch, length, ...), `unpack` lays them out
again; layers read the cumulative lengths, the question-answering head reads the mask.

Layers receive it as the keyword argument `stoker_sequences`. transformers 5 passes unknown keyword arguments from the base
model to the layers (BERT, RoBERTa, XLM-RoBERTa, CamemBERT, ELECTRA, DistilBERT, ALBERT, ModernBERT), and activation
checkpointing keeps them among the arguments of whatever it recomputes.

There is one fallback, `ambient`: the context of the base model's call. It serves those that do not receive the keyword:

- RemBERT, MPNet and DeBERTa, whose base models drop keyword arguments, and every family in transformers 4;
- encoders and wrappers that users put between a base model and its layers, if they drop keyword arguments;
- functions that are called with hidden states only: MPNet's `compute_position_bias`, DeBERTa's `get_rel_pos` and the span
  logits of a question-answering head.

A checkpoint around such a layer or encoder recomputes it during the backward pass, when that context is gone. For this case
`attach` leaves the sequences on the storage of the hidden states, which the checkpoint keeps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stoker.kernels.mask import read_tokens
from stoker.model.class_swap import is_exporting

__all__ = [
    "HeadCall",
    "Positions",
    "Sequences",
    "ambient",
    "attach",
    "count",
    "counting",
    "read_mask",
    "read_sequence_ids",
    "running",
    "running_sequences",
    "seen_by_head",
    "sequence_ids",
    "wanted_by_head",
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
    dtype: torch.dtype
    """Type of the activations inside the base model."""
    index: Tensor | None = None
    """(tokens,) flat position in (batch * length) of each packed row; None: every position is kept."""
    mask: Tensor | None = None
    """(batch, length) bool, True at real tokens; None: no padding."""
    left: tuple[Tensor, Tensor] | None = None
    """Rows of the batch that begin with padding, and the packed row of their first token."""
    first_from: nn.Module | None = None
    """The layer, the last one, whose output is needed for the first token of each sequence only; None: for all tokens."""

    @property
    def tokens(self) -> int:
        return self.positions.shape[0]

    @functools.cached_property
    def starts(self) -> Tensor:
        """`cu_seqlens` as the kernels take it."""
        return self.cu_seqlens.to(torch.int64)

    @functools.cached_property
    def shared(self) -> dict[Any, Any]:
        """What layers have made of arguments that all layers of this call are given, so that it is made once."""
        return {}

    def pairs(self) -> int:
        """Pairs of positions of the same sequence."""
        return int(torch.diff(self.cu_seqlens).long().square().sum())

    def pack(self, x: Tensor) -> Tensor:
        """(batch, length, ...) to (1, tokens, ...). A batch of one row, such as position_ids, is repeated for all rows."""
        if x.dim() == 1:  # position_ids (length,), which stock broadcasts
            x = x.unsqueeze(0)
        if x.shape[0] != self.batch:
            x = x.expand(self.batch, *x.shape[1:])
        rows = x.reshape(self.batch * self.length, *x.shape[2:])
        return (rows if self.index is None else rows.index_select(0, self.index)).unsqueeze(0)

    def unpack(self, x: Tensor) -> Tensor:
        """(1, tokens, width) to (batch, length, width), zeros at padding.

        If a row begins with padding, its first column is that of its first token, because heads and poolers read it there.
        """
        packed = x.squeeze(0)
        rows = self.lay_out(packed)
        if self.left is not None:
            at, first = self.left
            rows = rows.index_copy(0, at * self.length, packed.index_select(0, first))
        return rows.view(self.batch, self.length, -1)

    def firsts(self, packed: Tensor) -> Tensor:
        """(tokens, width) to (sequences, width): the first token of each sequence."""
        return packed.index_select(0, self.cu_seqlens[:-1])

    def unpack_firsts(self, x: Tensor) -> Tensor:
        """(1, sequences, width) to (batch, 1, width), zeros where a row of the batch has no token."""
        firsts = x.squeeze(0)
        if firsts.shape[0] != self.batch and self.mask is not None:
            rows = self.mask.any(1).nonzero().squeeze(1)
            firsts = firsts.new_zeros(self.batch, firsts.shape[1]).index_copy(0, rows, firsts)
        return firsts.unsqueeze(1)

    def lay_out(self, packed: Tensor) -> Tensor:
        """(tokens, ...) to (batch * length, ...), zeros at padding."""
        if self.index is None:
            return packed
        return packed.new_zeros(self.batch * self.length, *packed.shape[1:]).index_copy_(0, self.index, packed)

    def positions_after(self, padding_idx: int, ids: Tensor | None) -> Tensor:
        """Positions as in RoBERTa: from padding_idx + 1; tokens equal to padding_idx are not counted and get padding_idx."""
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
    """The sequences of a batch, or the reason why it cannot be split into sequences."""
    tokens = None if mask is None else read_tokens(real := mask.bool())
    if isinstance(tokens, str):
        return tokens
    if tokens is None or tokens.index.numel() == batch * length:
        ends = torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=device)
        positions = torch.arange(length, device=device).repeat(batch)
        return Sequences(batch=batch, length=length, cu_seqlens=ends, longest=length, positions=positions, dtype=dtype)
    left = None
    if tokens.shifted:
        rows = ((tokens.firsts > 0) & (tokens.counts > 0)).nonzero().squeeze(1)
        left = rows, (tokens.counts.cumsum(0) - tokens.counts)[rows]
    return Sequences(
        batch=batch,
        length=length,
        cu_seqlens=tokens.starts.int(),
        longest=tokens.longest,
        positions=tokens.positions,
        dtype=dtype,
        index=tokens.index,
        mask=real,
        left=left,
    )


def read_sequence_ids(ids: Tensor, *, dtype: torch.dtype) -> Sequences:
    """The sequences of a packed batch: `ids` (batch, length) changes where the next sequence of a row begins."""
    batch, length = ids.shape
    first = torch.ones(batch, length, dtype=torch.bool)
    first[:, 1:] = ids[:, 1:] != ids[:, :-1]
    starts = first.reshape(-1).nonzero().squeeze(1)
    lengths = torch.diff(starts, append=torch.tensor([batch * length]))
    positions = torch.arange(batch * length) - starts.repeat_interleave(lengths)
    return Sequences(
        batch=batch,
        length=length,
        cu_seqlens=_cumulative(lengths).int(),
        longest=int(lengths.max()),
        positions=positions,
        dtype=dtype,
    )


def sequence_ids(cu_seqlens: Tensor) -> Tensor:
    """(1, tokens) numbers of the sequences with these cumulative lengths."""
    lengths = torch.diff(cu_seqlens.long())
    return torch.arange(lengths.numel()).repeat_interleave(lengths).unsqueeze(0)


def _cumulative(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0))


@dataclass
class HeadCall:
    """A call of a model whose head needs the sequences of the base model inside it."""

    packed: bool = False
    """The head takes the last hidden state packed, as (1, tokens, width)."""
    first_token: bool = False
    """The head reads the last hidden state of each row's first token only, and takes it as (batch, 1, width)."""
    masks_padding: bool = False
    """What the head computes at padding is masked before anybody sees it."""
    sequences: Sequences | None = None
    """Those of the last padding-free call of a base model."""


# A context variable, because several threads may run the same model at once.
_RUNNING: ContextVar[Sequences | HeadCall | None] = ContextVar("stoker_running", default=None)


@contextmanager
def running(call: Sequences | HeadCall | None) -> Iterator[None]:
    """Makes `call` the ambient one within this block. A head's call receives the sequences of base models inside it."""
    outer = _RUNNING.get()
    token = _RUNNING.set(call)
    try:
        yield
    finally:
        _RUNNING.reset(token)
    if isinstance(call, Sequences) and isinstance(outer, HeadCall):
        outer.sequences = call


def ambient(hidden: Tensor) -> Sequences | None:
    """The sequences of `hidden` (1, tokens, width), for a caller that did not receive them; None outside of a base model."""
    if is_exporting():  # an exported model is the stock model, and torch.export cannot read context variables
        return None
    call = _RUNNING.get()
    if torch._C._current_graph_task_id() != -1:  # a backward pass, so this may be a recomputation
        call = _attached(hidden) or call
    return call if isinstance(call, Sequences) else None


def attach(hidden: Tensor, sequences: Sequences) -> None:
    """Lets `ambient` recognize `hidden`, or an alias of it, when a checkpoint recomputes from it."""
    hidden.untyped_storage().stoker_sequences = sequences  # type: ignore[attr-defined]


def _attached(hidden: Tensor) -> Sequences | None:
    try:
        found: Sequences | None = getattr(hidden.untyped_storage(), "stoker_sequences", None)
    except NotImplementedError:  # a tensor of torch.func, which has no storage
        return None
    return found if found is not None and tuple(hidden.shape[:2]) == (1, found.tokens) else None


def running_sequences() -> Sequences | None:
    """The sequences of the padding-free base model whose forward is being computed; None outside of one.

    None in compiled code, too, which cannot read context variables: torch.compile skips padding-free base models.
    """
    call = None if torch.compiler.is_compiling() else _RUNNING.get()
    return call if isinstance(call, Sequences) else None


def wanted_by_head() -> HeadCall:
    """What the head around this call of a base model takes; without one, all hidden states as (batch, length, width)."""
    call = _RUNNING.get()
    return call if isinstance(call, HeadCall) else HeadCall()


def seen_by_head() -> Sequences | None:
    """The sequences of the base model that ran inside this head's call; None if it ran as stock does."""
    call = None if is_exporting() else _RUNNING.get()
    return call.sequences if isinstance(call, HeadCall) else None


@dataclass
class Positions:
    """How many positions, padding included, optimized base models were given in training, and how many they computed."""

    given: int = 0
    computed: int = 0
    pairs: int = 0
    """Pairs of positions of one sequence, as attention computes them."""
    pairs_wanted: bool = True
    """Whether somebody will ask for the pairs, which have to be read from a tensor."""


_COUNT: ContextVar[Positions | None] = ContextVar("stoker_positions", default=None)


@contextmanager
def counting(positions: Positions) -> Iterator[None]:
    """Within this block, calls of optimized base models are added to `positions`."""
    token = _COUNT.set(positions)
    try:
        yield
    finally:
        _COUNT.reset(token)


def count(given: int, computed: int, pairs: Callable[[], int]) -> None:
    """Adds a call to the positions of the enclosing `counting` block, if there is one.

    Calls without gradients are not counted: losses that compute a batch twice begin with one.
    """
    if (positions := _COUNT.get()) is not None and torch.is_grad_enabled():
        positions.given += given
        positions.computed += computed
        if positions.pairs_wanted:
            positions.pairs += pairs()
