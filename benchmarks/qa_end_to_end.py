"""SQuAD end to end, stock transformers against Stoker: read, tokenize, train, evaluate; seconds and F1.

    python benchmarks/qa_end_to_end.py                      10,000 questions, 1 epoch, 2,000 dev questions, 3 seeds
    python benchmarks/qa_end_to_end.py --train 60 --dev 20 --seeds 1      a minute, to see that it works

Both sides get the same questions, settings and seeds. The stock side does what run_qa.py does: the tokenizer on (question,
context) pairs, every row padded to max_seq_length, transformers.Trainer in fp32 with fused AdamW. Answers are chosen from
the logits by the same code on both sides, and that code is faster than run_qa.py's, which is to stock's advantage.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from end_to_end import main

SETTINGS: dict[str, Any] = {"per_device_train_batch_size": 12, "per_device_eval_batch_size": 8, "num_train_epochs": 1}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--train", type=int, default=10_000, help="training questions")
    parser.add_argument("--dev", type=int, default=2_000, help="dev questions")
    parser.add_argument("--max_seq_length", type=int, default=384)
    parser.add_argument("--doc_stride", type=int, default=128)
    parser.add_argument("--learning_rate", type=float, default=1e-4)


def run(side: str, seed: int, chosen: argparse.Namespace) -> dict[str, Any]:
    import transformers

    from stoker.tasks.loading import quiet
    from stoker.tasks.qa.data import read_questions

    quiet()
    transformers.set_seed(seed)
    phases: dict[str, float] = {}
    begin = time.perf_counter()
    squad = chosen.data / "squad"
    train = read_questions(squad / "train-v1.1.json.gz", training=True)[: chosen.train]
    dev = read_questions(squad / "dev-v1.1.json.gz", training=False)[: chosen.dev]
    tokenizer = transformers.AutoTokenizer.from_pretrained(chosen.model)
    model = transformers.AutoModelForQuestionAnswering.from_pretrained(chosen.model)
    phases["load"] = time.perf_counter() - begin
    with tempfile.TemporaryDirectory() as folder:
        shared = {**SETTINGS, "output_dir": folder, "learning_rate": chosen.learning_rate, "seed": seed, "use_cpu": True,
                  "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "logging_steps": 100_000,
                  "remove_unused_columns": False}  # fmt: skip
        steps = _stock if side == "stock" else _stoker
        scores = steps(train, dev, tokenizer, model, shared, chosen, phases)
    return {**scores, "phases": phases}


def _timed(phases: dict[str, float], name: str, action: Any) -> Any:
    begin = time.perf_counter()
    result = action()
    phases[name] = time.perf_counter() - begin
    return result


def _stoker(
    train: Any, dev: Any, tokenizer: Any, model: Any, shared: Any, chosen: Any, phases: dict[str, float]
) -> Any:
    from stoker import TrainingArguments
    from stoker.tasks.collate import Collator
    from stoker.tasks.qa.features import make_windows
    from stoker.tasks.qa.fine_tune import QaOptions, QaTrainer

    window = {"max_seq_length": chosen.max_seq_length, "doc_stride": chosen.doc_stride, "fresh": True}
    sets = _timed(phases, "tokenize", lambda: (
        make_windows(train, tokenizer, training=True, **window), make_windows(dev, tokenizer, training=False, **window)
    ))  # fmt: skip
    trainer = QaTrainer(
        model, TrainingArguments(**shared), options=QaOptions(), train_dataset=sets[0], eval_dataset=sets[1],
        processing_class=tokenizer, data_collator=Collator.of(tokenizer),
    )  # fmt: skip
    _timed(phases, "train", trainer.train)
    metrics = _timed(phases, "evaluate", trainer.evaluate)
    return {"f1": metrics["eval_f1"], "exact_match": metrics["eval_exact_match"], "windows": len(sets[0])}


def _stock(train: Any, dev: Any, tokenizer: Any, model: Any, shared: Any, chosen: Any, phases: dict[str, float]) -> Any:
    import transformers

    from stoker.tasks.qa.answers import choose_answers
    from stoker.tasks.qa.features import make_windows
    from stoker.tasks.qa.metrics import squad

    rows, dev_rows = _timed(
        phases, "tokenize", lambda: (_pairs(train, tokenizer, chosen, True), _pairs(dev, tokenizer, chosen, False))
    )
    trainer = transformers.Trainer(
        model, transformers.TrainingArguments(**shared, eval_do_concat_batches=True), train_dataset=rows,
        processing_class=tokenizer, data_collator=transformers.default_data_collator,
    )  # fmt: skip
    _timed(phases, "train", trainer.train)

    def evaluate() -> dict[str, float]:
        start, end = trainer.predict(dev_rows).predictions
        # Not counted as tokenizing: it only says where each window lies in its text, which run_qa.py keeps as offsets.
        windows = make_windows(dev, tokenizer, max_seq_length=chosen.max_seq_length, doc_stride=chosen.doc_stride,
                               training=False)  # fmt: skip
        assert len(windows) == len(start)
        answers = choose_answers(windows, list(zip(start, end, strict=True)))
        return squad({answer.id: answer.text for answer in answers}, dev)

    return {**_timed(phases, "evaluate", evaluate), "windows": len(rows)}


def _pairs(questions: Any, tokenizer: Any, chosen: Any, training: bool, batch: int = 1000) -> list[dict[str, Any]]:
    """Padded rows by the tokenizer's own truncation, with the labels of the usual recipe."""
    rows: list[dict[str, Any]] = []
    for begin in range(0, len(questions), batch):
        part = questions[begin : begin + batch]
        found = tokenizer(
            [q.question.lstrip() for q in part], [q.context for q in part], truncation="only_second",
            max_length=chosen.max_seq_length, stride=chosen.doc_stride, return_overflowing_tokens=True,
            return_offsets_mapping=True, padding="max_length",
        )  # fmt: skip
        for row, number in enumerate(found["overflow_to_sample_mapping"]):
            item = {name: found[name][row] for name in ("input_ids", "attention_mask", "token_type_ids")}
            if training:
                item["start_positions"], item["end_positions"] = _label(part[number], found, row)
            rows.append(item)
    return rows


def _label(question: Any, found: Any, row: int) -> tuple[int, int]:
    spans, owners = found["offset_mapping"][row], found.sequence_ids(row)
    inside = [i for i, owner in enumerate(owners) if owner == 1]
    begin, end = question.starts[0], question.starts[0] + len(question.answers[0])
    if spans[inside[0]][0] > begin or spans[inside[-1]][1] < end:
        return 0, 0
    return max(i for i in inside if spans[i][0] <= begin), min(i for i in inside if spans[i][1] >= end)


if __name__ == "__main__":
    main(__doc__ or "", options, run, sides=("stock", "stoker"), score="f1", script=str(Path(__file__).resolve()))
