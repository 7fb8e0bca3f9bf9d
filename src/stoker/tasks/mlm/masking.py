"""Which tokens are masked: single tokens, whole words, or spans of words. transformers' collator masks them.

Its own `whole_word_mask` needs the place of every token in its text, takes punctuation for a part of the word before, and never
replaces a token by a random one; here words are found from the tokens alone, and masked tokens are replaced as usual.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DataCollatorForLanguageModeling

from stoker.errors import UserError
from stoker.tasks.collate import Collator
from stoker.tasks.tokens import fast_backend

__all__ = ["MASKINGS", "MaskingCollator", "Words"]

MASKINGS = ("tokens", "words", "spans")

_SPAN_STOP, _LONGEST_SPAN = 0.2, 10
"""Lengths of spans in words are drawn from a geometric distribution, as for SpanBERT: 3.8 words on average."""

_BYTE_LEVEL = "\u0120"  # stands for a space; bytes outside of ASCII are written as letters and signs, all part of words
_SPACES = (_BYTE_LEVEL, "\u2581")
_IN_WORDS = ("", "_", "'", "\u2019")

Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Words:
    """Where words begin, by token id."""

    begins: Bools
    """The token begins a word, wherever it is."""
    alone: Bools
    """Punctuation: a word by itself, so that the token after it begins a word, too."""

    @classmethod
    def of(cls, tokenizer: Any) -> Words:
        """Read from the vocabulary, in which tokens that continue a word have a prefix, or those that begin one have a mark."""
        vocabulary: dict[str, int] = tokenizer.get_vocab()
        model = fast_backend(tokenizer).model
        prefix = getattr(model, "continuing_subword_prefix", None) if type(model).__name__ == "WordPiece" else None
        mark = next((one for one in _SPACES if sum(name.startswith(one) for name in vocabulary) > 1), "")
        if not prefix and not mark and type(model).__name__ != "WordLevel":
            raise UserError(
                f"the tokenizer {type(tokenizer).__name__} does not mark where words begin, which --masking words and spans "
                "need; use --masking tokens"
            )
        size = max(vocabulary.values(), default=0) + 1
        begins, alone = np.zeros(size, bool), np.zeros(size, bool)
        for name, number in vocabulary.items():
            if prefix:
                continues = name.startswith(prefix) and name != prefix
            else:
                continues = bool(mark) and not name.startswith(mark)
                first = name.removeprefix(mark)[:1]
                letter = first.isalnum() or first in _IN_WORDS or (mark == _BYTE_LEVEL and first > "\x7f")
                alone[number] = not letter
            begins[number] = not continues or alone[number]
        return cls(begins, alone)

    def starts(self, ids: NDArray[np.int64], special: Bools) -> Bools:
        """For a row, which tokens begin a word; special tokens do, too."""
        found: Bools = self.begins[ids] | special
        found[1:] |= self.alone[ids[:-1]] | special[:-1]
        found[:1] = True
        return found


class MaskingCollator(DataCollatorForLanguageModeling):  # type: ignore[misc]
    """transformers' collator for rows with `special_tokens_mask`, with a choice of what is masked.

    With "tokens" it draws the same masks as its base class.
    """

    def __init__(self, tokenizer: Any, masking: str = "tokens", probability: float = 0.15) -> None:
        # Chosen tokens are marked as the only ones that may be masked, and then all of them are.
        super().__init__(tokenizer, mlm_probability=probability if masking == "tokens" else 1.0)
        self.masking, self.probability = masking, probability
        self.words = None if masking == "tokens" else Words.of(tokenizer)
        self.pad = Collator.of(tokenizer)

    def torch_call(self, examples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        if self.words is not None:
            examples = [self._chosen(example, self.words) for example in examples]
        batch = self.pad(examples)
        special = batch.pop("special_tokens_mask").bool() | (batch["attention_mask"] == 0)
        batch["input_ids"], batch["labels"] = self.torch_mask_tokens(batch["input_ids"], special_tokens_mask=special)
        return batch

    def _chosen(self, example: dict[str, Any], words: Words) -> dict[str, Any]:
        ids, special = np.asarray(example["input_ids"]), np.asarray(example["special_tokens_mask"], bool)
        starts = words.starts(ids, special)
        number = np.cumsum(starts) - 1
        allowed = ~special[starts]
        chosen = self._spans(number, allowed) if self.masking == "spans" else self._some(len(allowed))
        return {**example, "special_tokens_mask": ~(chosen & allowed)[number]}

    def _some(self, words: int) -> Bools:
        """Each word with the same probability."""
        drawn: Bools = (torch.rand(words, generator=self.generator) < self.probability).numpy()
        return drawn

    def _spans(self, number: NDArray[np.int64], allowed: Bools) -> Bools:
        """Spans of words at random places, until they cover their share of the tokens."""
        sizes = np.bincount(number, minlength=len(allowed))
        left = self.probability * float(sizes[allowed].sum())
        chosen = np.zeros(len(allowed), bool)
        seed = int(torch.randint(1 << 62, (), generator=self.generator))
        random = np.random.default_rng(seed)
        # A span that would exceed the share is taken with the probability that makes the share right on average.
        while left > 0 and not chosen[allowed].all():
            begin, length = int(random.integers(len(allowed))), int(min(random.geometric(_SPAN_STOP), _LONGEST_SPAN))
            span = np.arange(begin, min(begin + length, len(allowed)))
            span = span[allowed[span] & ~chosen[span]]
            size = float(sizes[span].sum())
            if size <= left or random.random() < left / size:
                chosen[span] = True
            left -= size
        return chosen
