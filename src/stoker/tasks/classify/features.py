"""Texts as model inputs. Each distinct text is tokenized once; long pairs are truncated at the longer text first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from stoker.tasks.cache import Arrays, cached, fingerprint
from stoker.tasks.classify.data import Example, Labels
from stoker.tasks.tokens import Ragged, Template, distinct, tokenize, whole_texts

__all__ = ["Rows", "make_rows"]


@dataclass(frozen=True)
class Rows(torch.utils.data.Dataset[dict[str, Any]]):
    """A data set of one or two texts per row."""

    examples: Sequence[Example]
    tokens: Ragged
    texts: NDArray[np.int32]
    """(rows, 1 or 2): index of the distinct text."""
    kept: NDArray[np.int32]
    """(rows, 1 or 2): how many of its tokens are used."""
    labels: NDArray[Any] | None
    template: Template

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        parts = [self.tokens[text][:kept] for text, kept in zip(self.texts[index], self.kept[index], strict=True)]
        ids, types = self.template.join(*parts)
        item: dict[str, Any] = {"input_ids": ids}
        if self.template.typed:
            item["token_type_ids"] = types
        if self.labels is not None:
            item["labels"] = self.labels[index].item()
        return item

    @property
    def lengths(self) -> NDArray[np.int64]:
        lengths: NDArray[np.int64] = self.kept.sum(1, dtype=np.int64) + self.template.specials
        return lengths

    def example_ids(self, indices: Sequence[int]) -> list[str]:
        return [self.examples[index].id for index in indices]


def make_rows(
    examples: Sequence[Example], tokenizer: Any, labels: Labels | None, *, max_seq_length: int, fresh: bool = False
) -> Rows:
    """The rows of `examples`. With `labels` None, their labels are numbers (regression)."""
    count = len(examples[0].texts)
    template = Template.read(tokenizer, count)
    texts, index = distinct([text for example in examples for text in example.texts])

    def make() -> Arrays:
        ids, _ = tokenize(tokenizer, texts, offsets=False)
        return {"ids": ids.values, "ends": ids.ends}

    found, _ = cached("classify", fingerprint(texts, [whole_texts(tokenizer).to_str()]), make, fresh=fresh)
    tokens = Ragged(found["ids"], found["ends"])  # type: ignore[arg-type]
    numbers = index.reshape(-1, count)
    kept = _truncated(tokens.lengths[numbers], max_seq_length - template.specials)
    values: NDArray[Any] | None = None
    if examples[0].label is not None:
        if labels is None:
            values = np.array([example.label for example in examples], np.float32)
        else:
            values = np.array([labels.number(example.label) for example in examples], np.int64)
    return Rows(examples, tokens, numbers, kept.astype(np.int32), values, template)


def _truncated(lengths: NDArray[np.int64], room: int) -> NDArray[np.int64]:
    """Truncates a row's texts to fit: the longer one first, then both equally."""
    if lengths.shape[1] == 1:
        return np.minimum(lengths, room)
    kept: NDArray[np.int64] = lengths.copy()
    over = np.nonzero(kept.sum(1) > room)[0]
    for row in over.tolist():
        short, long = sorted((0, 1), key=lambda side: int(kept[row, side]))
        kept[row, short] = min(int(kept[row, short]), room // 2)
        kept[row, long] = room - kept[row, short]
    return kept
