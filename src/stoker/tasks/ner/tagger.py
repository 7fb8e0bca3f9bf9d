"""Finds entities in a text with a trained model, as evaluation does: each word has the tag that its first token is given.

The other tokens of a word are not trained, so that transformers' pipelines would cut words where these are predicted otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from stoker.tasks.collate import Collator
from stoker.tasks.loading import row_length
from stoker.tasks.ner.data import Sentence, split_words
from stoker.tasks.ner.features import Rows, rows_of_text
from stoker.tasks.ner.tags import OUTSIDE, iob2

__all__ = ["Found", "Tagger"]

_BATCH = 8  # windows of a long text at once


@dataclass(frozen=True)
class Found:
    """An entity, by character."""

    begin: int
    end: int
    label: str
    score: float
    """The mean probability of its words' tags."""


@dataclass(frozen=True)
class Tagger:
    model: Any
    """A token classifier in evaluation mode."""
    tokenizer: Any

    def __call__(self, text: str) -> list[Found]:
        words = split_words(text)
        if not words:
            return []
        length = row_length(None, self.tokenizer, self.model.config)
        rows = rows_of_text(
            Sentence("the text", text, tuple(words), None, None), self.tokenizer, max_seq_length=length,
            doc_stride=min(64, length // 4),
        )  # fmt: skip
        best = [(scores.argmax(-1), scores.amax(-1)) for scores in self._probabilities(rows)]
        (numbers,) = rows.by_word([labels.numpy() for labels, _ in best], -1)
        (scores,) = rows.by_word([score.numpy() for _, score in best], 0.0)
        names = self.model.config.id2label
        tags = iob2([OUTSIDE if number < 0 else names[number] for number in numbers.tolist()])
        return _joined(words, tags, scores.tolist())

    def _probabilities(self, rows: Rows) -> list[torch.Tensor]:
        """(tokens, labels) of each window."""
        collate = Collator.of(self.tokenizer)
        found: list[torch.Tensor] = []
        with torch.no_grad():
            for begin in range(0, len(rows), _BATCH):
                batch = collate([rows[i] for i in range(begin, min(begin + _BATCH, len(rows)))])
                logits = self.model(**batch).logits.float()
                found += [
                    one[mask.bool()].softmax(-1) for one, mask in zip(logits, batch["attention_mask"], strict=True)
                ]
        return found


def _joined(words: list[tuple[int, int]], tags: tuple[str, ...], scores: list[float]) -> list[Found]:
    """The entities of IOB2 tags."""
    groups: list[list[int]] = []
    for number, tag in enumerate(tags):
        if tag.startswith("B-"):
            groups.append([number])
        elif tag != OUTSIDE:
            groups[-1].append(number)
    return [
        Found(
            words[group[0]][0], words[group[-1]][1], tags[group[0]][2:],
            sum(scores[number] for number in group) / len(group),
        )
        for group in groups
    ]  # fmt: skip
