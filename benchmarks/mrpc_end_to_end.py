"""MRPC end to end, stock transformers against Stoker: read, tokenize, train, evaluate; seconds, accuracy and F1.

    python benchmarks/mrpc_end_to_end.py                    3 epochs, 3 seeds
    python benchmarks/mrpc_end_to_end.py --train 64 --dev 32 --epochs 1 --seeds 1     to see that it works

"stock" pads rows to the longest of their batch, as accelerate's nlp_example.py does; "stock, padded to 128" pads them to
--max_seq_length, as run_glue.py does unless told otherwise. Both in fp32 with fused AdamW; all sides get the same examples,
settings and seeds.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from end_to_end import main

SIDES = ("stock", "stock, padded to 128", "stoker")


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--train", type=int, default=None, help="training pairs (all)")
    parser.add_argument("--dev", type=int, default=None, help="dev pairs (all)")
    parser.add_argument("--epochs", type=float, default=3)
    parser.add_argument("--learning_rate", type=float, default=5e-5)
    parser.add_argument("--max_seq_length", type=int, default=128)


def run(side: str, seed: int, chosen: argparse.Namespace) -> dict[str, Any]:
    import transformers

    from stoker import Trainer, TrainingArguments
    from stoker.tasks.classify.data import Labels, read_examples
    from stoker.tasks.classify.features import make_rows
    from stoker.tasks.classify.metrics import measure
    from stoker.tasks.collate import Collator
    from stoker.tasks.loading import quiet

    quiet()
    transformers.set_seed(seed)
    phases: dict[str, float] = {}
    marks = [time.perf_counter()]

    def lap(name: str) -> None:
        marks.append(time.perf_counter())
        phases[name] = marks[-1] - marks[-2]

    mrpc = chosen.data / "mrpc"
    train = read_examples(mrpc / "train.tsv", task="mrpc")[: chosen.train]
    dev = read_examples(mrpc / "dev.tsv", task="mrpc")[: chosen.dev]
    tokenizer = transformers.AutoTokenizer.from_pretrained(chosen.model)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(chosen.model, num_labels=2)
    lap("load")
    sets: list[Any]
    stock, padding = side != "stoker", "max_length" if "padded" in side else False
    if stock:
        sets = [_rows(part, tokenizer, chosen.max_seq_length, padding) for part in (train, dev)]
    else:
        labels = Labels(("0", "1"))
        sets = [
            make_rows(part, tokenizer, labels, max_seq_length=chosen.max_seq_length, fresh=True)
            for part in (train, dev)
        ]
    lap("tokenize")
    kind: Any = (transformers.Trainer, transformers.TrainingArguments) if stock else (Trainer, TrainingArguments)
    with tempfile.TemporaryDirectory() as folder:
        args = kind[1](
            output_dir=folder, per_device_train_batch_size=16, per_device_eval_batch_size=32, learning_rate=chosen.learning_rate,
            num_train_epochs=chosen.epochs, warmup_steps=50, seed=seed, use_cpu=True, report_to="none", save_strategy="no",
            disable_tqdm=True, logging_steps=100_000, remove_unused_columns=False,
        )  # fmt: skip
        collate = transformers.DataCollatorWithPadding(tokenizer) if stock else Collator.of(tokenizer)
        trainer = kind[0](
            model, args, train_dataset=sets[0], eval_dataset=sets[1], processing_class=tokenizer, data_collator=collate,
            compute_metrics=lambda found: measure(("accuracy", "f1"), found.predictions, found.label_ids, regression=False),
        )  # fmt: skip
        trainer.train()
        lap("train")
        metrics = trainer.evaluate()
        lap("evaluate")
    return {"accuracy": 100 * metrics["eval_accuracy"], "f1": 100 * metrics["eval_f1"], "phases": phases}


def _rows(examples: Any, tokenizer: Any, length: int, padding: str | bool, batch: int = 1000) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for begin in range(0, len(examples), batch):
        part = examples[begin : begin + batch]
        texts = [[example.texts[side] for example in part] for side in (0, 1)]
        found = tokenizer(*texts, truncation=True, max_length=length, padding=padding)
        rows += [
            {**{name: found[name][row] for name in found}, "labels": int(example.label)}
            for row, example in enumerate(part)
        ]
    return rows


if __name__ == "__main__":
    main(__doc__ or "", options, run, sides=SIDES, score="accuracy", script=str(Path(__file__).resolve()))
