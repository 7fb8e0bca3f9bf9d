"""A model as exporters take it: tensors in, tensors out, by position."""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from stoker.tasks.export.exported_model import Inputs

__all__ = ["Graph", "example_rows", "model_inputs", "silence"]

_INPUTS = ("input_ids", "attention_mask", "token_type_ids")
_OUTPUTS = ("logits", "start_logits", "end_logits", "last_hidden_state")
"""Outputs that are exported, under the names that transformers and optimum give them."""


class Graph(nn.Module):
    def __init__(self, model: Any, inputs: tuple[str, ...]) -> None:
        super().__init__()
        self.model = model
        self.inputs = inputs

    def named(self, *tensors: Tensor) -> dict[str, Tensor]:
        found = self.model(**dict(zip(self.inputs, tensors, strict=True)), return_dict=True)
        return {name: found[name] for name in _OUTPUTS if found.get(name) is not None}

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.named(*tensors).values())

    def outputs(self, rows: Inputs) -> list[str]:
        with torch.no_grad():
            return list(self.named(*rows.values()))


def model_inputs(model: Any, tokenizer: Any) -> tuple[str, ...]:
    """The inputs that the tokenizer makes and the model takes."""
    taken = inspect.signature(model.forward).parameters
    return tuple(name for name in _INPUTS if name in taken and name in tokenizer.model_input_names)


def example_rows(inputs: tuple[str, ...], tokenizer: Any, lengths: list[int], seed: int = 0) -> Inputs:
    """Rows of random tokens, padded to the longest: one for each of the lengths."""
    draw = torch.Generator().manual_seed(seed)
    usual = sorted({*tokenizer.get_vocab().values()} - {*tokenizer.all_special_ids})
    numbers = torch.tensor(usual)[torch.randint(len(usual), (len(lengths), max(lengths)), generator=draw)]
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    padding = tokenizer.pad_token_id or 0
    whole = {
        "input_ids": torch.where(mask.bool(), numbers, padding),
        "attention_mask": mask,
        "token_type_ids": torch.zeros_like(mask),
    }
    return {name: whole[name] for name in inputs}


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Silences remarks of the exporters about packages and steps that a user cannot act on."""
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)
