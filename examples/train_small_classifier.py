"""What every rank of the other examples in this folder does: train a small classifier with transformers' Trainer.

`stoker.distributed.setup()` is the one line that Stoker needs. It comes before `transformers` is imported.
"""

from __future__ import annotations

from typing import Any


def train(output_dir: str, steps: int = 4) -> dict[str, Any]:
    import stoker.distributed

    joined = stoker.distributed.setup()

    import torch
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    torch.manual_seed(0)
    model = BertForSequenceClassification(
        BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=100)
    )
    # a text is of class 1 if it begins with a token from the upper half of the vocabulary
    texts = torch.randint(5, 100, (64, 16))
    rows = [{"input_ids": text, "labels": int(text[0] >= 50)} for text in texts]
    arguments = TrainingArguments(
        output_dir, max_steps=steps, per_device_train_batch_size=4, report_to="none", save_strategy="no", use_cpu=True
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=rows)
    loss = trainer.train().training_loss
    return {
        "rank": joined.rank,
        "ranks": joined.size,
        "backend": joined.backend,
        "threads": joined.threads,
        "cpus": joined.cpus,
        "optimised": [part for part, *_ in stoker.report(model).applied],
        "loss": loss,
        "weights": float(sum(parameter.detach().double().sum() for parameter in model.parameters())),
    }
