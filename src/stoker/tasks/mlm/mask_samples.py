"""A few masked texts with the model's predictions, for the report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from stoker.tasks.mlm.features import TextRows
from stoker.tasks.mlm.masked_trainer import IGNORED, masked_logits
from stoker.tasks.shown_rows import spread

__all__ = ["samples"]

_TOKENS = 48
"""Of each text in the report."""


def samples(trainer: Any, rows: TextRows, most: int = 6) -> list[dict[str, Any]]:
    """Rows spread over the data, masked as in evaluation; the rows of the run log's `examples` entry."""
    tokenizer, model = trainer.processing_class, trainer.model
    chosen = spread(len(rows), most)
    items = [{name: value[:_TOKENS] for name, value in rows[index].items()} for index in chosen]
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(trainer.args.seed)
        batch = trainer.data_collator(items)
    labels = batch.pop("labels")
    training = model.training
    model.eval()
    with torch.no_grad():
        best = masked_logits(model, model, batch, labels != IGNORED).argmax(-1)
    model.train(training)
    filled = torch.where(labels == IGNORED, batch["input_ids"], labels)
    filled[labels != IGNORED] = best
    shown = []
    for item, masked, guess, label in zip(items, batch["input_ids"], filled, labels, strict=True):
        length = len(item["input_ids"])
        keep = [at for at in range(length) if not item["special_tokens_mask"][at]]
        if any(label[at] != IGNORED for at in keep):
            shown.append(_sample(tokenizer, masked[keep].tolist(), guess[keep].tolist(), label[keep].tolist()))
    return shown


def _sample(tokenizer: Any, masked: Sequence[int], guess: Sequence[int], label: Sequence[int]) -> dict[str, Any]:
    text, ends = "", [0]
    for at in range(len(guess)):  # the place of each token, by decoding one more at a time
        text = _decoded(tokenizer, guess[: at + 1])
        ends.append(len(text))
    marks, wrong = [], []
    for at, true in enumerate(label):
        if true == IGNORED:
            continue
        begin, end = ends[at], ends[at + 1]
        begin += len(text[begin:end]) - len(text[begin:end].lstrip())
        marks.append({"begin": begin, "end": end, "right": guess[at] == true})
        if guess[at] != true:
            wrong.append(_decoded(tokenizer, [true]).strip())
    return {
        "question": _decoded(tokenizer, masked),
        "context": text,
        "marks": marks,
        "expected": wrong,
    }


def _decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    text: str = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    return text
