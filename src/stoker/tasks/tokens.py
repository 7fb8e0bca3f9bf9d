"""Tokenizes each distinct text once into flat arrays of token ids, which are joined to model inputs later.

SQuAD has five questions per paragraph; tokenizing (question, paragraph) pairs would tokenize each paragraph five times. The
special tokens between the parts are read from an encoded sample (`Template.read`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.errors import UserError

__all__ = ["Ragged", "Template", "distinct", "fast_backend", "pieces", "tokenize", "whole_texts"]

Ints = NDArray[np.int32]


@dataclass(frozen=True)
class Ragged:
    """Rows of different length, one after the other."""

    values: Ints
    """(total,) or (total, 2)"""
    ends: NDArray[np.int64]
    """(rows + 1,): the start of each row, and the end of the last."""

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __getitem__(self, row: int) -> Ints:
        return self.values[self.ends[row] : self.ends[row + 1]]

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.ends)


def distinct(texts: Sequence[str]) -> tuple[list[str], Ints]:
    """The distinct texts in order of appearance, and the index into them of each of `texts`."""
    numbers: dict[str, int] = {}
    index = np.fromiter((numbers.setdefault(text, len(numbers)) for text in texts), np.int32, len(texts))
    return list(numbers), index


def fast_backend(tokenizer: Any) -> Any:
    """The Rust tokenizer inside; raises UserError for a tokenizer that has none."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise UserError(
            f"the tokenizer {type(tokenizer).__name__} has no fast (Rust) version, which training needs; "
            "choose a model with a tokenizer.json"
        )
    return backend


def whole_texts(tokenizer: Any) -> Any:
    """The Rust tokenizer inside, set to neither truncate nor pad. What it did before is not part of `to_str()` any more."""
    backend = fast_backend(tokenizer)
    backend.no_truncation()
    backend.no_padding()
    return backend


def tokenize(tokenizer: Any, texts: Sequence[str], *, offsets: bool, batch: int = 2048) -> tuple[Ragged, Ragged | None]:
    """Token ids of each text without special tokens and, with `offsets`, the characters (begin, end) of each token."""
    backend = whole_texts(tokenizer)
    ids: list[Ints] = []
    spans: list[Ints] = []
    for begin in range(0, len(texts), batch):
        part = list(texts[begin : begin + batch])
        # Special tokens are added and removed again: the post-processor trims the offsets only if it adds them.
        encode = backend.encode_batch if offsets else backend.encode_batch_fast
        for encoding in encode(part, add_special_tokens=True):
            keep = np.array(encoding.special_tokens_mask, np.int8) == 0
            ids.append(np.array(encoding.ids, np.int32)[keep])
            if offsets:
                spans.append(np.array(encoding.offsets, np.int32).reshape(-1, 2)[keep])
    ends = np.concatenate([[0], np.cumsum([len(row) for row in ids])]).astype(np.int64)
    flat = np.concatenate(ids) if ids else np.empty(0, np.int32)
    if not offsets:
        return Ragged(flat, ends), None
    return Ragged(flat, ends), Ragged(np.concatenate(spans) if spans else np.empty((0, 2), np.int32), ends)


@dataclass(frozen=True)
class Template:
    """How a tokenizer joins one or two texts: the special tokens around them, and the token type of each part."""

    parts: tuple[tuple[int, ...], ...]
    """Special ids before the first text, (between the texts,) after the last."""
    special_types: tuple[tuple[int, ...], ...]
    text_types: tuple[int, ...]
    cls_id: int | None
    typed: bool
    """The model takes token_type_ids."""

    @classmethod
    def read(cls, tokenizer: Any, texts: int) -> Template:
        """Reads the template from an encoded sample of one or two texts."""
        backend = whole_texts(tokenizer)
        sample = ("one", "two")[:texts]
        encoding = backend.encode(*sample, add_special_tokens=True)
        special = encoding.special_tokens_mask
        # Texts consist of the tokens that are not special; sequence_ids tell which text a token belongs to.
        bounds: list[tuple[int, int]] = []
        for number in range(texts):
            at = [i for i, owner in enumerate(encoding.sequence_ids) if owner == number and not special[i]]
            bounds.append((at[0], at[-1] + 1))
        edges = [0, *(edge for bound in bounds for edge in bound), len(special)]
        gaps = [slice(edges[i], edges[i + 1]) for i in range(0, len(edges), 2)]
        return cls(
            parts=tuple(tuple(encoding.ids[gap]) for gap in gaps),
            special_types=tuple(tuple(encoding.type_ids[gap]) for gap in gaps),
            text_types=tuple(encoding.type_ids[begin] for begin, _ in bounds),
            cls_id=tokenizer.cls_token_id,
            typed="token_type_ids" in tokenizer.model_input_names,
        )

    @property
    def specials(self) -> int:
        return sum(map(len, self.parts))

    def join(self, *texts: Ints) -> tuple[Ints, Ints]:
        """Input ids and token types of one row."""
        ids: list[Any] = [self.parts[0]]
        types: list[Any] = [self.special_types[0]]
        for number, text in enumerate(texts):
            ids += [text, self.parts[number + 1]]
            types += [np.full(len(text), self.text_types[number], np.int32), self.special_types[number + 1]]
        return (
            np.concatenate([np.asarray(part, np.int32) for part in ids]),
            np.concatenate([np.asarray(part, np.int32) for part in types]),
        )

    def text_begin(self, number: int, *texts: int) -> int:
        """Position of text `number` in a row whose texts have these lengths."""
        return sum(len(part) for part in self.parts[: number + 1]) + sum(texts[:number])


def pieces(total: int, room: int, overlap: int) -> list[tuple[int, int]]:
    """Ranges of at most `room` that cover `total`, each starting `room - overlap` after the previous one."""
    pieces, begin = [], 0
    while True:
        end = min(begin + room, total)
        pieces.append((begin, end))
        if end == total:
            return pieces
        begin += room - overlap
