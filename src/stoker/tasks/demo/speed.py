"""Measures seconds per training step, stock against Stoker, in one process per side that take steps in turns.

Two processes, because allocator settings apply to a whole process; in turns, because a machine's speed changes by the minute.
`python -m stoker.tasks.demo.speed SIDE FOLDER SETTINGS` is one side: it takes one step per input line.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

from stoker.errors import UserError

__all__ = ["SIDES", "compare"]

SIDES = ("stock", "stoker")


def compare(folder: Path, model: str, *, steps: int, batch: int, max_seq_length: int) -> dict[str, list[float]]:
    """Seconds of each of `steps` steps per side, on the data in folder/train.json."""
    setting = json.dumps({"model": model, "batch": batch, "max_seq_length": max_seq_length, "steps": steps})
    workers = {
        side: subprocess.Popen(
            [sys.executable, "-m", "stoker.tasks.demo.speed", side, str(folder), setting],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for side in SIDES
    }
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    try:
        for worker in workers.values():
            _step_seconds(worker)  # ready: model loaded, first step done
        for _ in range(steps):
            for side, worker in workers.items():
                assert worker.stdin is not None
                worker.stdin.write("step\n")
                worker.stdin.flush()
                seconds[side].append(_step_seconds(worker))
    finally:
        for worker in workers.values():
            worker.kill()
            worker.wait()
    return seconds


def _step_seconds(worker: subprocess.Popen[str]) -> float:
    stream: IO[str] | None = worker.stdout
    assert stream is not None
    for line in stream:
        if line.startswith("took "):
            return float(line[5:])
    raise UserError(f"the comparison with stock ended early (exit code {worker.wait()})")


def _worker(side: str, folder: Path, setting: dict[str, Any]) -> None:
    import torch
    import transformers

    from stoker.hf.arguments import TrainingArguments
    from stoker.hf.trainer import Trainer
    from stoker.tasks.collate import Collator
    from stoker.tasks.loading import quiet
    from stoker.tasks.qa.data import read_questions
    from stoker.tasks.qa.features import make_windows

    quiet()
    torch.manual_seed(0)
    length = setting["max_seq_length"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(setting["model"])
    questions = read_questions(folder / "train.json", training=True)[: setting["batch"] * (setting["steps"] + 1)]
    windows = make_windows(questions, tokenizer, max_seq_length=length, doc_stride=32, training=True)
    model = transformers.AutoModelForQuestionAnswering.from_pretrained(setting["model"])
    # Stock as run_qa.py runs it: every row padded to max_seq_length.
    collate = Collator.of(tokenizer, length if side == "stock" else None)
    kind, arguments = (
        (transformers.Trainer, transformers.TrainingArguments) if side == "stock" else (Trainer, TrainingArguments)
    )
    args = arguments(
        output_dir=str(folder / f".speed-{side}"), use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no",
        per_device_train_batch_size=setting["batch"], learning_rate=1e-5,
    )  # fmt: skip
    trainer = kind(model, args, data_collator=collate, train_dataset=windows)
    trainer.create_optimizer_and_scheduler(num_training_steps=1000)
    model, optimizer = trainer.accelerator.prepare(trainer.model, trainer.optimizer)
    trainer.model_wrapped, trainer.optimizer, trainer.current_gradient_accumulation_steps = model, optimizer, 1

    def step(number: int) -> float:
        rows = range(number * setting["batch"], (number + 1) * setting["batch"])
        begin = time.perf_counter()
        inputs = collate([windows[row % len(windows)] for row in rows])
        trainer.training_step(model, inputs)
        trainer.accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        optimizer.step()
        trainer.lr_scheduler.step()
        model.zero_grad()
        return time.perf_counter() - begin

    print(f"took {step(0)}", flush=True)
    for number, _ in enumerate(sys.stdin, 1):
        print(f"took {step(number)}", flush=True)


if __name__ == "__main__":
    _worker(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]))
