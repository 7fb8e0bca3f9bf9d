"""Collates rows of token ids into one padded batch. The padding costs little: it never enters the optimized model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

__all__ = ["Collator"]


@dataclass(frozen=True)
class Collator:
    """Pads what has a value per token: input ids, token types, labels of tokens. Every other key is a number per row."""

    pad_id: int
    pad_left: bool = False
    pad_to: int | None = None
    """Pad every batch to this length, as --pad_to_max_length does; None pads to the longest row."""

    @classmethod
    def of(cls, tokenizer: Any, pad_to: int | None = None) -> Collator:
        return cls(tokenizer.pad_token_id or 0, tokenizer.padding_side == "left", pad_to)

    def __call__(self, items: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        lengths = [len(item["input_ids"]) for item in items]
        width = self.pad_to or max(lengths)
        batch: dict[str, torch.Tensor] = {}
        mask = np.zeros((len(items), width), np.int64)
        for name in items[0]:
            if np.ndim(items[0][name]):
                rows = np.full((len(items), width), {"input_ids": self.pad_id, "labels": -100}.get(name, 0), np.int64)
                for row, item, length in zip(rows, items, lengths, strict=True):
                    row[self._place(width, length)] = item[name]
                batch[name] = torch.from_numpy(rows)
            else:
                batch[name] = torch.tensor([item[name] for item in items])
        for row, length in zip(mask, lengths, strict=True):
            row[self._place(width, length)] = 1
        if self.pad_left:
            for name in ("start_positions", "end_positions"):
                if name in batch:
                    batch[name] += torch.tensor([width - length for length in lengths])
        batch["attention_mask"] = torch.from_numpy(mask)
        return batch

    def _place(self, width: int, length: int) -> slice:
        return slice(width - length, width) if self.pad_left else slice(0, length)
