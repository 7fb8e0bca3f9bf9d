"""What models have learned, stock and with Stoker: similarity (STS-B), named entities (WNUT17) and masked tokens, over seeds.

    python benchmarks/task_quality.py --out docs/figures                    18 runs of at most a minute on two cores
    python benchmarks/task_quality.py --out docs/figures --side "stsb stoker" --seeds 1

Each run trains MiniLM for some steps and is then scored on data that it has not seen: Spearman's correlation on STS-B's dev set,
entity F1 on WNUT17's dev set, and the loss of masked tokens in held-out contexts of SQuAD. Runs with the same seed see the same
rows in the same order and begin with the same weights; only the random numbers of dropout differ. A run that is already in the
folder's task_quality.json is not repeated. Prints the table of the documentation.
"""

from __future__ import annotations

import argparse
import csv
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import curves
import torch
from minilm import pretrained

from tasks import read_tagged

Prepare = Callable[[Any], Any]
Run = dict[str, Any]


def batches(rows: Any, seed: int, size: int) -> Callable[[int], list[Any]]:
    """The rows of a step, in an order that only the seed decides; the data may be used more than once."""
    order = list(range(len(rows)))
    random.Random(seed).shuffle(order)
    return lambda step: [rows[order[index % len(order)]] for index in range(step * size, (step + 1) * size)]


def stsb(data: Path, seed: int, steps: int, prepare: Prepare) -> Run:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator
    from sentence_transformers.sentence_transformer.losses import CoSENTLoss

    def read(split: str) -> list[tuple[str, str, float]]:
        with open(data / "similarity" / f"stsb-en-{split}.csv", encoding="utf-8", newline="") as file:
            return [(one, other, float(score) / 5) for one, other, score in csv.reader(file)]

    model = prepare(SentenceTransformer(pretrained(), device="cpu", local_files_only=True))
    loss = CoSENTLoss(model)
    rows_of = batches(read("train"), seed, 16)

    def loss_of(step: int) -> Any:
        one, other, scores = zip(*rows_of(step), strict=True)
        return loss([model.preprocess(list(texts)) for texts in (one, other)], torch.tensor(scores))

    losses = curves.train(model, loss_of, steps, lr=5e-5, warm_up=10)
    model.eval()
    one, other, scores = zip(*read("dev"), strict=True)
    found = EmbeddingSimilarityEvaluator(one, other, scores, write_csv=False)(model)
    return {"losses": losses, "score": 100 * found["spearman_cosine"]}


def wnut17(data: Path, seed: int, steps: int, prepare: Prepare) -> Run:
    from transformers import AutoModelForTokenClassification, AutoTokenizer

    from stoker.tasks.collate import Collator
    from stoker.tasks.ner.features import make_rows
    from stoker.tasks.ner.metrics import measure
    from stoker.tasks.ner.tags import OUTSIDE, recognise

    tokenizer = AutoTokenizer.from_pretrained(pretrained())
    collate = Collator.of(tokenizer)
    training, dev = (read_tagged(data, split) for split in ("train", "dev"))
    scheme = recognise(sentence.tags for sentence in training)
    labels = sorted({tag for sentence in training for tag in sentence.tags})
    lengths = {"max_seq_length": 128, "doc_stride": 32}
    rows, unseen = (make_rows(sentences, tokenizer, labels, **lengths) for sentences in (training, dev))
    model = prepare(AutoModelForTokenClassification.from_pretrained(pretrained(), num_labels=len(labels)))
    rows_of = batches(rows, seed, 16)
    losses = curves.train(model, lambda step: model(**collate(rows_of(step))).loss, steps, lr=5e-4, warm_up=20)
    model.eval()
    predicted: list[Any] = []
    with torch.no_grad():
        for first in range(0, len(unseen), 64):
            inputs = collate([unseen[index] for index in range(first, min(first + 64, len(unseen)))])
            inputs.pop("labels")
            predicted.extend(model(**inputs).logits.argmax(-1).numpy())
    numbers = unseen.by_word(predicted, labels.index(OUTSIDE))
    tags = [[labels[number] for number in sentence] for sentence in numbers]
    return {"losses": losses, "score": 100 * measure([one.tags for one in dev], tags, scheme).f1}


def masked_lm(data: Path, seed: int, steps: int, prepare: Prepare) -> Run:
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    from stoker.tasks.mlm.masking import MaskingCollator
    from stoker.tasks.qa.data import read_questions

    tokenizer = AutoTokenizer.from_pretrained(pretrained())
    questions = read_questions(data / "squad" / "train-v1.1.json.gz", training=True)
    contexts = list(dict.fromkeys(one.context for one in questions))[:2000]
    encoded = tokenizer(contexts, truncation=True, max_length=64, return_special_tokens_mask=True)
    names = ("input_ids", "token_type_ids", "special_tokens_mask")
    rows = [{name: encoded[name][index] for name in names} for index in range(len(contexts))]
    collate = MaskingCollator(tokenizer)
    torch.manual_seed(0)
    unseen = [collate(rows[first : first + 40]) for first in range(0, 200, 40)]
    rows_of = batches(rows[200:], seed, 8)
    masks = torch.Generator()

    def loss_of(step: int) -> Any:
        collate.generator = masks.manual_seed(seed * steps + step)  # the masks must not depend on dropout's numbers
        return model(**collate(rows_of(step))).loss

    torch.manual_seed(seed)
    model = prepare(AutoModelForMaskedLM.from_pretrained(pretrained()))
    losses = curves.train(model, loss_of, steps, lr=5e-4, warm_up=10)
    model.eval()
    with torch.no_grad():
        return {"losses": losses, "score": statistics.fmean(float(model(**batch).loss) for batch in unseen)}


TASKS: dict[str, tuple[str, int, Callable[..., Run]]] = {
    "stsb": ("STS-B, Spearman x 100", 100, stsb),
    "wnut17": ("WNUT17, entity F1", 120, wnut17),
    "mlm": ("masked tokens, held-out loss", 80, masked_lm),
}
"""Title, steps and run of each task. The steps are what stock takes in about half a minute on two cores."""

SIDES = ("stock", "stoker")
COLOURS = {
    f"{task} {side}": colour
    for task, colours in zip(
        TASKS, (("#495057", "#d9480f"), ("#1971c2", "#f08c00"), ("#2b8a3e", "#ae3ec9")), strict=True
    )
    for side, colour in zip(SIDES, colours, strict=True)
}


def one_run(side: str, seed: int, data: Path, steps: int | None) -> Run:
    from stoker.model import optimize
    from stoker.tasks.loading import quiet

    quiet()
    task, _, optimizer = side.partition(" ")
    _, usual, run = TASKS[task]
    torch.manual_seed(seed)
    begin = time.perf_counter()
    found = run(data, seed, steps or usual, optimize if optimizer == "stoker" else lambda model: model)
    return {**found, "seconds": time.perf_counter() - begin}


def summary(runs: curves.Runs) -> str:
    """The table of the documentation: the score of each seed, the mean, and how far seeds are apart."""
    lines = ["| | side | each seed | mean | standard deviation | last 50 losses |", "|---|---|---|---|---|---|"]
    for side in COLOURS:
        if mine := curves.of_side(runs, side):
            task, _, name = side.partition(" ")
            scores = [run["score"] for run in mine]
            spread = statistics.stdev(scores) if len(scores) > 1 else 0.0
            each = ", ".join(f"{score:.2f}" for score in scores)
            lines.append(
                f"| {TASKS[task][0]} | {name} | {each} | {statistics.fmean(scores):.2f} | {spread:.2f} "
                f"| {curves.tail(mine):.3f} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path(__file__).resolve().parents[2] / "shared" / "data")
    parser.add_argument("--steps", type=int, help="default: 80 to 120, by task")

    def runner(arguments: argparse.Namespace) -> Callable[[str, int], Run]:
        return lambda side, seed: one_run(side, seed, arguments.data, arguments.steps)

    curves.main("task_quality", parser, COLOURS, runner, ("score", "seconds"), summary)


if __name__ == "__main__":
    main()
