"""Sentences as model inputs: overlapping windows over their tokens, with the tag of each word as the label of its first token.

A token in the overlap of two windows is labelled, and later predicted, in the one where it is farther from the edge, so that
every word counts once.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from stoker.errors import UserError
from stoker.tasks.cache import Arrays, cached, fingerprint
from stoker.tasks.ner.data import Sentence
from stoker.tasks.tokens import Ragged, Template, pieces, tokenize, whole_texts

__all__ = ["IGNORED", "Rows", "make_rows", "rows_of_text"]

IGNORED = -100
"""The label of tokens that have none; transformers' own."""


@dataclass(frozen=True)
class Rows(torch.utils.data.Dataset[dict[str, Any]]):
    """A data set of windows; item i is a dictionary for the collator."""

    sentences: Sequence[Sentence]
    tokens: Ragged
    """Token ids of each sentence."""
    words: Ragged
    """For each token the word that begins with it; -1 if none does."""
    labels: Ragged | None
    windows: NDArray[np.int64]
    """(windows, 5): sentence, first token, end token, and the part of these that counts, from and to."""
    template: Template

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        sentence, begin, end, first, last = self.windows[index].tolist()
        ids, types = self.template.join(self.tokens[sentence][begin:end])
        item: dict[str, Any] = {"input_ids": ids}
        if self.template.typed:
            item["token_type_ids"] = types
        if self.labels is not None:
            labels = np.full(len(ids), IGNORED, np.int64)
            at = self.template.text_begin(0) - begin
            labels[at + first : at + last] = self.labels[sentence][first:last]
            item["labels"] = labels
        return item

    @property
    def lengths(self) -> NDArray[np.int64]:
        lengths: NDArray[np.int64] = self.windows[:, 2] - self.windows[:, 1] + self.template.specials
        return lengths

    def example_ids(self, indices: Sequence[int]) -> list[str]:
        return [self.sentences[self.windows[index, 0]].where for index in indices]

    def by_word(self, predicted: Sequence[NDArray[Any]], otherwise: float) -> list[NDArray[Any]]:
        """The label or score of each word, from those of each window's tokens; `otherwise` for words without tokens."""
        found = [np.full(len(sentence.words), otherwise) for sentence in self.sentences]
        for (sentence, begin, _, first, last), labels in zip(self.windows.tolist(), predicted, strict=True):
            words = self.words[sentence][first:last]
            at = self.template.text_begin(0) - begin
            starts = words >= 0
            found[sentence][words[starts]] = labels[at + first : at + last][starts]
        return found


def make_rows(
    sentences: Sequence[Sentence],
    tokenizer: Any,
    labels: Sequence[str],
    *,
    max_seq_length: int,
    doc_stride: int,
    all_tokens: bool = False,
    fresh: bool = False,
) -> Rows:
    """The windows of all sentences. With `all_tokens`, a word's other tokens are labelled, too, as inside of its entity."""
    room = max_seq_length - Template.read(tokenizer, 1).specials
    if room <= doc_stride:
        raise UserError(
            f"windows of --max_seq_length {max_seq_length} have {room} tokens of text and cannot overlap by --doc_stride "
            f"{doc_stride}; use a larger --max_seq_length or a smaller --doc_stride"
        )
    texts = [sentence.text for sentence in sentences]

    def make() -> Arrays:
        ids, spans = tokenize(tokenizer, texts, offsets=True)
        assert spans is not None
        return {"ids": ids.values, "ends": ids.ends, "spans": spans.values}

    found, _ = cached("ner", fingerprint(texts, [whole_texts(tokenizer).to_str()]), make, fresh=fresh)
    tokens = Ragged(found["ids"], found["ends"])  # type: ignore[arg-type]
    rows = _rows(sentences, tokenizer, tokens, found["spans"], labels, room, doc_stride, all_tokens)
    if not len(rows):
        raise UserError("the tokenizer makes no tokens of the data's texts; is it the tokenizer of this language?")
    return rows


def rows_of_text(sentence: Sentence, tokenizer: Any, *, max_seq_length: int, doc_stride: int) -> Rows:
    """The windows of one sentence without tags, none if it has no tokens; not kept in the cache."""
    tokens, spans = tokenize(tokenizer, [sentence.text], offsets=True)
    assert spans is not None
    room = max_seq_length - Template.read(tokenizer, 1).specials
    return _rows([sentence], tokenizer, tokens, spans.values, (), room, doc_stride)


def _rows(
    sentences: Sequence[Sentence],
    tokenizer: Any,
    tokens: Ragged,
    spans: NDArray[Any],
    labels: Sequence[str],
    room: int,
    doc_stride: int,
    all_tokens: bool = False,
) -> Rows:
    of_word = _words_of(sentences, spans, tokens.ends)
    before = np.concatenate([[-1], of_word])[:-1]
    before[tokens.ends[:-1][tokens.lengths > 0]] = -1
    starts = np.where(of_word != before, of_word, -1).astype(np.int32)
    flat = None
    if sentences and sentences[0].tags is not None:
        flat = _labels(sentences, labels, of_word, starts, tokens.ends, all_tokens)
    windows = [
        (number, *window)
        for number, length in enumerate(tokens.lengths.tolist())
        if length  # a text of characters that the tokenizer drops has no tokens
        for window in _windows(length, room, doc_stride)
    ]
    return Rows(
        sentences,
        tokens,
        Ragged(starts, tokens.ends),
        None if flat is None else Ragged(flat, tokens.ends),
        np.array(windows, np.int64).reshape(-1, 5),
        Template.read(tokenizer, 1),
    )


def _words_of(sentences: Sequence[Sentence], spans: NDArray[Any], ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each token the word in which its last character lies; -1 if none. (Some tokens begin with the space before a word.)"""
    sizes = np.array([len(sentence.text) + 1 for sentence in sentences], np.int64)
    counts = np.array([len(sentence.words) for sentence in sentences], np.int64)
    text_at, word_at = np.cumsum(sizes) - sizes, np.cumsum(counts) - counts
    # All texts as one, so that all words are found in one search.
    words = np.array([edge for sentence in sentences for edge in sentence.words], np.int64).reshape(-1, 2)
    words = words + np.repeat(text_at, counts)[:, None]
    of_text = np.repeat(np.arange(len(sentences)), np.diff(ends))
    last = spans[:, 1].astype(np.int64) - 1 + text_at[of_text]
    word = np.searchsorted(words[:, 0], last, side="right") - 1
    inside = (spans[:, 1] > spans[:, 0]) & (word >= 0)
    inside[inside] &= last[inside] < words[word[inside], 1]
    found: NDArray[np.int64] = np.where(inside, word - word_at[of_text], -1)
    return found


def _labels(
    sentences: Sequence[Sentence],
    names: Sequence[str],
    of_word: NDArray[np.int64],
    starts: NDArray[np.int32],
    ends: NDArray[np.int64],
    all_tokens: bool,
) -> NDArray[np.int32]:
    """The label of each token. A tag that is not among `names` has none: the model cannot predict it."""
    numbers = {name: number for number, name in enumerate(names)}
    inside = {name: numbers.get(f"I-{name[2:]}", number) for name, number in numbers.items() if name[:2] == "B-"}
    flat = np.full(len(starts), IGNORED, np.int32)
    for sentence, begin, end in zip(sentences, ends, ends[1:], strict=False):
        first = np.array([numbers.get(tag, IGNORED) for tag in sentence.tags or ()], np.int32)
        own = starts[begin:end]
        flat[begin:end][own >= 0] = first[own[own >= 0]]
        if all_tokens:
            others = np.array([inside.get(tag, numbers.get(tag, IGNORED)) for tag in sentence.tags or ()], np.int32)
            rest = (own < 0) & (of_word[begin:end] >= 0)
            flat[begin:end][rest] = others[of_word[begin:end][rest]]
    return flat


def _windows(length: int, room: int, overlap: int) -> list[tuple[int, int, int, int]]:
    """First and end token of each window, and the part of it that counts: each overlap is divided in the middle."""
    found = pieces(length, room, overlap)
    edges = [0, *((begin + end) // 2 for (_, end), (begin, _) in itertools.pairwise(found)), length]
    return [(*piece, *part) for piece, part in zip(found, itertools.pairwise(edges), strict=True)]
