"""Accumulating gradients over small batches trains as one batch of the same rows does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from hf import tiny


def _first_log(folder: Path, model: Any, rows: int, accumulated: int, collate: Any) -> tuple[float, float]:
    trainer = tiny.trainer(
        folder, model=model, max_steps=1, save_strategy="no", max_grad_norm=1.0,
        per_device_train_batch_size=rows, gradient_accumulation_steps=accumulated,
    )  # fmt: skip
    trainer.data_collator = collate
    trainer.train()
    entry = trainer.state.log_history[0]
    return entry["loss"], entry["grad_norm"]


def _sixteen_tokens(items: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Rows of one length, all tokens labelled: the mean over tokens is the mean over batches."""
    ids = torch.stack([(torch.tensor(item["input_ids"]).repeat(4))[:16] for item in items])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids % 2}


@pytest.mark.parametrize("head", ["SequenceClassification", "TokenClassification", "MaskedLM"])
def test_accumulated_batches_give_the_loss_and_gradient_of_one_large_batch(tree_path: Path, head: str) -> None:
    config = tiny.tiny_model(dropout=0.0).config
    collate = tiny.pad if head == "SequenceClassification" else _sixteen_tokens
    found = []
    for rows, accumulated in ((16, 1), (4, 4)):
        torch.manual_seed(0)
        model = getattr(transformers, f"BertFor{head}")(config)
        found.append(_first_log(tree_path / str(rows), model, rows, accumulated, collate))
    assert found[1] == pytest.approx(found[0], rel=1e-3)
