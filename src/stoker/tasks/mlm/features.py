"""Texts as rows of token ids: each line by itself, or all lines joined and divided into rows of the same length.

Lines are tokenized with their special tokens, as run_mlm.py does, and stored one after the other; a row is a slice of that.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from stoker.errors import UserError
from stoker.tasks.cache import fingerprint
from stoker.tasks.faults import Faults
from stoker.tasks.mlm.texts import Source
from stoker.tasks.token_store import Batch, StoredTokens, stored
from stoker.tasks.tokens import Template, whole_texts

__all__ = ["TextRows", "make_rows", "tokenize_sources"]


@dataclass(frozen=True)
class TextRows(torch.utils.data.Dataset[dict[str, Any]]):
    """A data set of rows; item i is a dictionary for the collator."""

    ids: NDArray[Any]
    ends: NDArray[np.int64] | None
    """The end of each line; None if lines are joined."""
    longest: int
    first: int
    """The number of the first row: training and validation may be parts of the same texts."""
    count: int
    last_special: NDArray[Any]
    """The special tokens at the end of a line, which a truncated line keeps."""
    is_special: NDArray[np.bool_]
    """By token id: whether it is never masked."""

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self.count:
            raise IndexError(index)
        begin, end = self._place(self.first + index)
        ids = self.ids[begin : min(end, begin + self.longest)].astype(np.int64)
        if end - begin > self.longest:
            ids[len(ids) - len(self.last_special) :] = self.last_special
        return {"input_ids": ids, "special_tokens_mask": self.is_special[ids]}

    def _place(self, row: int) -> tuple[int, int]:
        if self.ends is None:
            return row * self.longest, min((row + 1) * self.longest, len(self.ids))
        return int(self.ends[row - 1]) if row else 0, int(self.ends[row])

    @property
    def lengths(self) -> NDArray[np.int64]:
        rows = slice(self.first, self.first + self.count)
        if self.ends is None:
            begin = np.arange(self.first, self.first + self.count, dtype=np.int64) * self.longest
            return np.minimum(self.longest, len(self.ids) - begin)
        before = int(self.ends[self.first - 1]) if self.first else 0
        return np.minimum(np.diff(self.ends[rows], prepend=before), self.longest)

    def part(self, first: int, count: int) -> TextRows:
        return dataclasses.replace(self, first=self.first + first, count=max(min(count, self.count - first), 0))

    def example_ids(self, indices: Sequence[int]) -> list[str]:
        return [f"row {self.first + index + 1}" for index in indices]


def make_rows(tokens: StoredTokens, tokenizer: Any, *, max_seq_length: int, line_by_line: bool) -> TextRows:
    template = Template.read(tokenizer, 1)
    special = np.zeros(max(len(tokenizer), max(tokenizer.all_special_ids, default=0) + 1), bool)
    # An unknown word is not special: it is not there for the sake of the format.
    special[[one for one in tokenizer.all_special_ids if one != tokenizer.unk_token_id]] = True
    count = len(tokens.ends) if line_by_line else -(-len(tokens.ids) // max_seq_length)
    last = np.array(template.parts[-1], np.int64)
    return TextRows(tokens.ids, tokens.ends if line_by_line else None, max_seq_length, 0, count, last, special)


def tokenize_sources(
    sources: Sequence[Source],
    tokenizer: Any,
    *,
    strict: bool,
    fresh: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> StoredTokens:
    """The tokens of all texts, each with its special tokens; from the cache if they were tokenized before."""
    key = fingerprint([source.fingerprint() for source in sources], [whole_texts(tokenizer).to_str()])
    seen: list[dict[str, Any]] = []
    unsaid = [say]

    def texts() -> Iterator[list[str]]:
        seen.clear()
        for source in sources:
            faults, good = Faults(source.name, strict), 0
            for part in source.texts(faults):
                good += len(part)
                yield part
            seen.append({"source": faults.source, "good": good, "count": faults.count, "shown": faults.shown})

    def make() -> Iterator[Batch]:
        names = sources[0].name if len(sources) == 1 else f"{len(sources)} files"
        while unsaid:  # texts without any token are made a second time
            unsaid.pop()(f"tokenizing {names} (once; the result is kept in the cache)")
        return encoded(tokenizer, texts())

    found = stored("mlm", key, make, lambda: {"seen": seen}, fresh=fresh)
    for one in found.facts["seen"]:  # bad rows are reported for texts from the cache, too
        if strict and one["count"]:
            raise UserError(f"{one['shown'][0]} (stopped at the first bad row because of --strict)")
        Faults(one["source"], count=one["count"], shown=one["shown"]).settle(one["good"])
    if not len(found.ids):
        raise UserError(f"{', '.join(source.name for source in sources[:3])} contains no text")
    return found


def encoded(tokenizer: Any, texts: Iterator[list[str]]) -> Iterator[Batch]:
    """Token ids of lists of texts. The tokenizer's threads encode the next list while this one is being collected."""
    backend = whole_texts(tokenizer)
    dtype = np.dtype(np.uint16 if len(tokenizer) <= 1 << 16 else np.uint32)

    def encode(part: list[str]) -> list[Any]:
        found: list[Any] = backend.encode_batch_fast(part, add_special_tokens=True)
        return found

    with ThreadPoolExecutor(1) as thread:
        pending = None
        for part in itertools.chain(filter(None, texts), [None]):
            done = pending
            pending = None if part is None else thread.submit(encode, part)
            if done is not None:
                rows = [one.ids for one in done.result()]
                lengths = np.fromiter(map(len, rows), np.int64, len(rows))
                flat = itertools.chain.from_iterable(rows)
                yield np.fromiter(flat, dtype, int(lengths.sum())), lengths
