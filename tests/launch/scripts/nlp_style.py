"""A classification script in the style people have: Accelerator and a plain loop. Knows nothing of Stoker."""

import argparse
import json
import os
import sys
import time

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification


def rows(count: int, length: int) -> list:
    generator = torch.Generator().manual_seed(1)
    made = []
    for index in range(count):
        used = int(torch.randint(max(length // 4, 6), length, (1,), generator=generator))
        made.append((torch.randint(1, 100, (used,), generator=generator), index % 2))
    return made


def collate(batch: list) -> dict:
    """Padded to the longest of the batch."""
    ids = torch.nn.utils.rnn.pad_sequence([one for one, _ in batch], batch_first=True)
    labels = torch.tensor([label for _, label in batch])
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mixed_precision", choices=["no", "fp16", "bf16", "fp8"], default=None)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--batch", type=int, default=8)
    args = parser.parse_args()

    accelerator = Accelerator(cpu=args.cpu, mixed_precision=args.mixed_precision)
    set_seed(42)
    heads = max(args.hidden // 16, 1) if args.hidden < 512 else 12
    config = BertConfig(
        vocab_size=100, hidden_size=args.hidden, num_hidden_layers=args.layers, num_attention_heads=heads,
        intermediate_size=4 * args.hidden,
    )  # fmt: skip
    model = BertForSequenceClassification(config)
    optimizer = AdamW(params=model.parameters(), lr=2e-5)
    loader = DataLoader(rows(args.rows, args.length), shuffle=True, batch_size=args.batch, collate_fn=collate)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    model.train()
    begin, losses = time.perf_counter(), []
    for batch in loader:
        outputs = model(**batch)
        accelerator.backward(outputs.loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(outputs.loss.item())
    seconds = time.perf_counter() - begin
    predictions = accelerator.gather_for_metrics(torch.tensor([accelerator.process_index]))
    unwrapped = accelerator.unwrap_model(model)
    report = {
        "rank": accelerator.process_index,
        "world": accelerator.num_processes,
        "type": str(accelerator.distributed_type),
        "device": str(accelerator.device),
        "precision": accelerator.mixed_precision,
        "gathered": predictions.tolist(),
        "losses": losses,
        "seconds": seconds,
        "threads": torch.get_num_threads(),
        "cores": sorted(os.sched_getaffinity(0)),
        "backend": torch.distributed.get_backend() if torch.distributed.is_initialized() else None,
        "origins": sorted({base.__module__.split(".")[0] for one in unwrapped.modules() for base in type(one).__mro__}),
        "argv": sys.argv[1:],
    }
    print("REPORT " + json.dumps(report), flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
