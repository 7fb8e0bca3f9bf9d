"""A model and data small enough that a training step takes milliseconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch.utils.data import Dataset

WORDS = [f"w{i}" for i in range(60)]
_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def tiny_model(seed: int = 0, dropout: float = 0.1, labels: int = 2) -> transformers.BertForSequenceClassification:
    torch.manual_seed(seed)
    config = transformers.BertConfig(
        vocab_size=100,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=128,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        num_labels=labels,
    )
    return transformers.BertForSequenceClassification(config)


class TinyData(Dataset):
    """Rows of different lengths; the label is whether token 7 comes before token 9."""

    def __init__(self, rows: int = 64, seed: int = 1) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.rows: list[dict[str, Any]] = []
        for _ in range(rows):
            length = int(torch.randint(5, 24, (1,), generator=generator))
            ids = torch.randint(10, 100, (length,), generator=generator)
            first = torch.randperm(length, generator=generator)[:2]
            ids[first[0]], ids[first[1]] = 7, 9
            self.rows.append({"input_ids": ids.tolist(), "labels": int(first[0] < first[1])})

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index]

    def example_ids(self, indices: list[int]) -> list[str]:
        return [f"row-{index}" for index in indices]


def pad(items: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    width = max(len(item["input_ids"]) for item in items)
    ids = torch.zeros(len(items), width, dtype=torch.long)
    mask = torch.zeros(len(items), width, dtype=torch.long)
    for row, item in enumerate(items):
        ids[row, : len(item["input_ids"])] = torch.tensor(item["input_ids"])
        mask[row, : len(item["input_ids"])] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([item["labels"] for item in items])}


def masked_trainer(folder: str | Path, mask_seed: int | None = None, **changed: Any) -> Any:
    """A masked language model with transformers' own collator, which draws random numbers for every batch."""
    from stoker.hf.trainer import Trainer

    config = tiny_model().config
    torch.manual_seed(0)
    tokenizer = transformers.BertTokenizerFast(vocab={name: i for i, name in enumerate(_SPECIAL + WORDS)})
    collator = transformers.DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.3, seed=mask_seed)
    rows = [{"input_ids": row["input_ids"]} for row in TinyData().rows]
    return Trainer(
        transformers.BertForMaskedLM(config), arguments(folder, **changed), data_collator=collator, train_dataset=rows,
        eval_dataset=rows,
    )  # fmt: skip


def arguments(folder: str | Path, **changed: Any) -> Any:
    from stoker.hf.arguments import TrainingArguments

    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "num_train_epochs": 2,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_steps": 5,
        "report_to": "none",
        "disable_tqdm": True,
    }
    return TrainingArguments(**{**settings, **changed})


def trainer(folder: str | Path, model: Any = None, data: Any = None, **changed: Any) -> Any:
    from stoker.hf.trainer import Trainer

    dataset = TinyData() if data is None else data
    return Trainer(
        tiny_model() if model is None else model,
        arguments(folder, **changed),
        data_collator=pad,
        train_dataset=dataset,
        eval_dataset=dataset,
    )
