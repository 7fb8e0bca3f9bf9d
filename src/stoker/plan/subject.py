"""What the plan is for: a model by name, folder or size, and rows of a typical length. Weights are random; time is not."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from stoker.errors import UserError

__all__ = ["BUILT_IN", "Subject"]

BUILT_IN = {"bert-base": (12, 768, 12), "bert-large": (24, 1024, 16), "minilm": (6, 384, 12), "bert-tiny": (2, 128, 2)}
"""Layers, width and heads of BERTs that need no files."""
_VOCABULARY = 30522


@dataclass(frozen=True)
class Subject:
    model: str = "bert-base"
    task: str = "qa"
    length: int = 160

    def build(self) -> Any:
        import torch
        import transformers

        torch.manual_seed(0)
        kinds = {
            "qa": transformers.AutoModelForQuestionAnswering,
            "classify": transformers.AutoModelForSequenceClassification,
        }
        return kinds[self.task].from_config(self._config()).train()

    def _config(self) -> Any:
        import transformers

        if self.model in BUILT_IN:
            layers, width, heads = BUILT_IN[self.model]
            return transformers.BertConfig(
                vocab_size=_VOCABULARY, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
                intermediate_size=4 * width,
            )  # fmt: skip
        try:
            return transformers.AutoConfig.from_pretrained(self.model)
        except (OSError, ValueError) as error:
            where = "folder" if os.path.isdir(self.model) else "name"
            raise UserError(
                f"--model {self.model!r}: no configuration can be read from that {where} "
                f"({str(error).strip().splitlines()[0][:120]}); built in are {', '.join(BUILT_IN)}"
            ) from None

    def rows(self, count: int, seed: int) -> dict[str, Any]:
        """A batch in which lengths vary as they do in text: from a half to one and a half of the mean."""
        import torch

        generator = torch.Generator().manual_seed(seed)
        spread = torch.linspace(0.5, 1.5, max(count, 2))[:count] if count > 1 else torch.ones(1)
        lengths = (self.length * spread).round().long().clamp(min=4)
        mask = torch.arange(int(lengths.max()))[None] < lengths[:, None]
        ids = torch.randint(1000, 2000, mask.shape, generator=generator) * mask
        inputs = {"input_ids": ids, "attention_mask": mask.long()}
        if self.task == "qa":
            return {**inputs, "start_positions": lengths // 2, "end_positions": lengths // 2}
        return {**inputs, "labels": torch.arange(count) % 2}
