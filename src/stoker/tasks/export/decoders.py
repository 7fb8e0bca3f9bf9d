"""Exports language models as GGUF or safetensors, with an adapter merged into the weights, and checks the result."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from stoker.tasks.export.comparison import Comparison, Figures, agreement, size_of
from stoker.tasks.export.export_source import Source
from stoker.tasks.export.graph_module import example_rows
from stoker.tasks.loading import most_tokens
from stoker.tasks.model_folder import ADAPTER
from stoker.tasks.sft.language_model import LanguageModel, base_of, load_for_chat

__all__ = ["export_language_model"]

_TEXTS, _BEGIN, _GENERATED = 8, 4, 28
"""Texts that are compared, tokens with which each begins, and tokens that the model adds."""

Say = Callable[[str], None]


def export_language_model(source: Source, to: str, int8: bool, folder: Path, say: Say) -> Comparison:
    """Writes the export into `folder`, loads it as `stoker chat` does, and compares the next tokens that both predict."""
    found = load_for_chat(source.name)
    say(f"writing {to}{' in int8' if int8 else ''}")
    if to == "gguf":
        from stoker.tasks.export.gguf_format import check_gguf, write_gguf

        check_gguf(found.model, found.tokenizer, source.name)
        write_gguf(found.model, found.tokenizer, folder, int8=int8, name=source.folder.name)
    else:
        _save(found, folder)
    again = load_for_chat(str(folder))
    before = Figures(_original_size(source.folder))
    return Comparison(to, int8, before, Figures(size_of(folder)), _agreement(found, again))


def _original_size(folder: Path) -> int:
    """Bytes of the model that the export replaces: with an adapter, that of its base model too; 0 if that is on the hub."""
    if not (folder / ADAPTER).is_file():
        return size_of(folder)
    base = size_of(Path(base_of(folder)))
    return base + size_of(folder) if base else 0


def _save(found: LanguageModel, folder: Path) -> None:
    found.model.config.name_or_path = ""
    found.model.save_pretrained(folder)
    found.tokenizer.save_pretrained(folder)


def _agreement(found: LanguageModel, again: LanguageModel) -> float:
    """The share of positions at which both predict the same next token, of texts that the model itself generates.

    Random tokens would tell little: their next tokens are nearly tied.
    """
    begin: Any = example_rows(("input_ids", "attention_mask"), found.tokenizer, [_BEGIN] * _TEXTS)
    longest = min(_BEGIN + _GENERATED, most_tokens(_BEGIN + _GENERATED, found.tokenizer, found.model.config))
    with torch.no_grad():
        texts = found.model.generate(
            **begin, do_sample=False, max_new_tokens=max(longest - _BEGIN, 1), eos_token_id=None, pad_token_id=0
        )
    return agreement(found.model, again.model, {"input_ids": texts, "attention_mask": torch.ones_like(texts)})
