"""The model to plan for, by name, folder or size, with rows of a typical length. Its weights are random."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict, dataclass
from typing import Any

from stoker.english import with_article
from stoker.errors import UserError
from stoker.tasks.loading import config_of, reason

__all__ = ["BUILT_IN", "Subject"]

BUILT_IN = {"bert-base": (12, 768, 12), "bert-large": (24, 1024, 16), "minilm": (6, 384, 12), "bert-tiny": (2, 128, 2)}
"""Layers, width and heads of BERT models that need no files."""
_VOCABULARY = 30522
_POSITIONS = 512
_FIRST_POSITION_IS_2 = ("roberta", "xlm-roberta", "camembert", "mpnet")
"""Models whose position table has two unused rows."""


@dataclass(frozen=True)
class Subject:
    model: str = "bert-base"
    task: str = "qa"
    length: int = 160

    def build(self, device: str = "cpu") -> Any:
        import torch
        import transformers

        torch.manual_seed(0)
        kinds = {
            "qa": transformers.AutoModelForQuestionAnswering,
            "classify": transformers.AutoModelForSequenceClassification,
        }
        config = self._config()
        try:
            with torch.device(device):
                return kinds[self.task].from_config(config).train()
        except Exception as error:  # a configuration can fail in many ways
            if isinstance(error, ValueError) and "Unrecognized configuration" in str(error):
                why = f"transformers has no {self.task} head for {with_article(config.model_type)}"
            else:
                why = f"its config.json does not describe a model that can be built ({reason(error)})"
            raise UserError(f"--model {self.model!r}: {why}") from None

    def check(self) -> None:
        """Raises UserError if the model cannot be used, before anything is measured."""
        longest = _POSITIONS if self.model in BUILT_IN else _longest(self._config())
        if self.length > longest:
            raise UserError(f"--length {self.length}: {self.model} takes rows of at most {longest} tokens")
        if self.model not in BUILT_IN:
            self.build("meta")  # needs neither time nor memory

    @property
    def identity(self) -> dict[str, Any]:
        """The cache key of a measurement. It contains config.json, since the model in a folder may change."""
        try:
            with open(os.path.join(self.model, "config.json"), encoding="utf-8") as file:
                return {**asdict(self), "config": file.read()}
        except OSError:
            return asdict(self)

    def _config(self) -> Any:
        import transformers

        if self.model in BUILT_IN:
            layers, width, heads = BUILT_IN[self.model]
            return transformers.BertConfig(
                vocab_size=_VOCABULARY, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
                intermediate_size=4 * width,
            )  # fmt: skip
        try:
            return config_of(self.model, flag="--model", trust_remote_code=False)
        except UserError as error:
            raise UserError(f"--model {self.model!r}: {error}; built-in models are {', '.join(BUILT_IN)}") from None

    def rows(self, count: int, seed: int, config: Any) -> dict[str, Any]:
        """A batch whose lengths vary from 0.5 to 1.5 times the mean, as far as the model allows."""
        import torch

        generator = torch.Generator().manual_seed(seed)
        spread = min(0.5, _longest(config) / self.length - 1)
        shares = torch.linspace(1 - spread, 1 + spread, count) if count > 1 else torch.ones(1)
        lengths = (self.length * shares).round().long().clamp(min=min(4, self.length))
        mask = torch.arange(int(lengths.max()))[None] < lengths[:, None]
        tokens = min(2000, config.vocab_size)
        ids = torch.randint(tokens // 2, tokens, mask.shape, generator=generator) * mask
        inputs = {"input_ids": ids, "attention_mask": mask.long()}
        if self.task == "qa":
            return {**inputs, "start_positions": lengths // 2, "end_positions": lengths // 2}
        return {**inputs, "labels": torch.arange(count) % 2}


def _longest(config: Any) -> int:
    """The maximum number of tokens in a row."""
    positions = getattr(config, "max_position_embeddings", None) or sys.maxsize
    return int(positions) - 2 * (config.model_type in _FIRST_POSITION_IS_2)
