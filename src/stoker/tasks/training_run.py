"""What every `stoker train` run does around its task: options, resume, memory, training, files beside the model, the report."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from stoker.errors import UserError
from stoker.hf.checkpointing import lock
from stoker.hf.checkpointing.restart import Start
from stoker.hf.secrets import without_secrets
from stoker.hf.trainer import Trainer
from stoker.machine.rates import Rates
from stoker.tasks import memory_estimate
from stoker.tasks.display import Display
from stoker.tasks.loading import quiet
from stoker.tasks.training_options import OptionParser, check_optimizer, given, words_of
from stoker.whole_files import write_text

__all__ = ["Job", "argument_errors", "begin", "cut", "finish", "know_the_machine", "train", "write_json"]

log = logging.getLogger("stoker")


@dataclasses.dataclass(frozen=True)
class Job:
    """The options of one run."""

    task: str
    argv: list[str]
    model: Any
    data: Any
    args: Any
    console: Console

    @property
    def command(self) -> list[str]:
        return ["stoker", "train", self.task, *without_secrets(self.argv)]

    def say(self, sentence: str) -> None:
        if self.args.process_index == 0:
            self.console.print(sentence)


def begin(task: str, argv: list[str], data_options: Any) -> Job:
    """Reads the command line and makes the process quiet."""
    _log_to_stderr()
    quiet()
    argv = words_of(argv)
    if (workers := _value("preprocessing_num_workers", argv)) is not None:
        os.environ["RAYON_NUM_THREADS"] = workers  # tokenizers reads it once, when it first tokenizes
    model, data, args = OptionParser(f"train {task}", data_options).read(argv)
    if not (args.do_train or args.do_eval or args.do_predict):
        raise UserError(f"stoker train {task} has nothing to do; give --do_train, --do_eval or --do_predict")
    if args.do_train and not given("output_dir", argv):
        raise UserError("--output_dir is missing: where should the model go?")
    _needs_data(args, data)
    if args.do_train:
        check_optimizer(args)
    _check_output(args)
    return Job(task, argv, model, data, args, Console(stderr=True, highlight=False, markup=False, soft_wrap=True))


def _log_to_stderr() -> None:
    if not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        log.addHandler(handler)
        log.propagate = False
    log.setLevel(logging.WARNING)


def _value(name: str, argv: list[str]) -> str | None:
    spelling = f"--{name}"
    for position, word in enumerate(argv):
        if word == spelling and position + 1 < len(argv):
            return argv[position + 1]
        if word.startswith(spelling + "="):
            return word.partition("=")[2]
    return None


def _needs_data(args: Any, data: Any) -> None:
    if data.dataset_name or (getattr(data, "task_name", None) and not (data.train_file or data.validation_file)):
        return
    for wanted, file, flag in (
        (args.do_train, data.train_file, "--train_file"),
        (args.do_eval, data.validation_file, "--validation_file"),
        (args.do_predict, data.test_file, "--test_file"),
    ):
        if wanted and not file:
            raise UserError(f"{flag} is missing (or --dataset_name, for a data set on the hub)")


def _check_output(args: Any) -> None:
    """What the Trainer would find out late: a folder that cannot be made, a service of --report_to that is not there."""
    from transformers.integrations import get_reporting_integration_callbacks

    try:
        Path(args.output_dir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output_dir {args.output_dir} cannot be made: {error.strerror}") from None
    if args.do_train and args.world_size == 1:
        lock.take(Path(args.output_dir)).release()  # it is held while training; a run that cannot have it learns so now
    try:
        for kind in get_reporting_integration_callbacks(args.report_to):
            kind()
    except (ValueError, RuntimeError, ImportError) as error:
        raise UserError(f"--report_to {' '.join(args.report_to)}: {' '.join(str(error).split())}") from None


@contextlib.contextmanager
def argument_errors(job: Job) -> Iterator[None]:
    """Around the making of a Trainer, which checks the options that depend on each other by raising."""
    try:
        yield
    except (ValueError, ImportError) as error:
        raise UserError(f"stoker train {job.task}: {' '.join(str(error).split())}") from None


def cut(rows: Sequence[Any], most: int | None) -> Sequence[Any]:
    return rows if most is None else rows[:most]


def train(job: Job, trainer: Trainer, **facts: Any) -> None:
    """Trains, saves model, metrics and state; `facts` go to the run's log."""
    args = job.args
    lengths = trainer.train_dataset.lengths
    optimized = getattr(args, "use_ipex", None) is not False
    if not job.data.skip_memory_check:
        need = memory_estimate.check_memory(trainer.model, lengths, args, optimized=optimized)
        job.say(f"{len(lengths):,} training rows, {int(lengths.sum()):,} tokens; about {need / 1e9:.1f} GB of memory")
    trainer.resume_arguments = ["train", job.task, *job.argv]
    trainer.recorder.task = {
        "task": job.task,
        "model": job.model.model_name_or_path,
        "command": shlex.join(job.command),
        **facts,
    }
    folder = Path(args.output_dir)
    with lock.only_run_in(folder, restarted=Start.read(folder).again):
        checkpoint = trainer.resume_point()
        if checkpoint is not None and not args.resume_from_checkpoint:
            job.say(f"resuming from {checkpoint} (--overwrite_output_dir starts over)")
        result = trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        trainer.save_model(_internal_call=True)  # published whole, when card and report are there too
        seconds, loss = result.metrics.get("train_runtime", 0.0), result.metrics.get("train_loss", 0.0)
        job.say(f"trained to step {result.global_step:,} in {seconds:,.0f} s, mean loss {loss:.3f}")
        if args.should_save:
            trainer.save_metrics("train", {**result.metrics, "train_samples": len(lengths)})
            trainer.save_state()


def dress(job: Job, trainer: Trainer) -> None:
    """Our display instead of transformers' bars and prints; figures often enough to draw a curve from."""
    from transformers.trainer_callback import PrinterCallback, ProgressCallback

    trainer.remove_callback(ProgressCallback)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Display())
    if not given("logging_steps", job.argv) and job.args.do_train:
        rows = len(trainer.train_dataset)
        steps = job.args.max_steps if job.args.max_steps > 0 else (
            job.args.num_train_epochs * rows / (job.args.train_batch_size * job.args.gradient_accumulation_steps)
        )  # fmt: skip
        job.args.logging_steps = max(int(steps / 100), 1)


def measure_peak(job: Job) -> None:
    """So that figures can say what share of the machine is used."""
    if job.args.process_index == 0 and job.args.do_train:
        know_the_machine(job.say)


def know_the_machine(say: Callable[[str], None]) -> Rates:
    """What the machine reaches: measured once, and looked at again for half a second in every run."""
    from stoker.kernels.clock import clock_ghz
    from stoker.machine import rates, this_machine
    from stoker.machine.measure import measure_rates, remeasure

    machine = this_machine()
    if (known := rates.known(machine)) is not None:
        return remeasure(machine, known, clock=clock_ghz)
    say("measuring what this machine can do (once, 6 seconds)")
    found = measure_rates(machine, clock=clock_ghz)
    rates.save(machine, found)
    return found


def write_json(path: Path, content: Any) -> None:
    """Whole or not at all, like everything a kill must not leave half done."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def finish(job: Job, trainer: Trainer, metrics: dict[str, Any]) -> None:
    """The model card and the report, and all of it to the hub if asked."""
    if not job.args.should_save or not job.args.do_train:
        return
    from stoker.run_report.log import read_run

    folder = Path(job.args.output_dir)
    try:
        run = read_run(folder)
    except OSError:  # none could be written
        return
    from stoker.tasks.card import model_card

    write_text(folder / "README.md", model_card(job, trainer, metrics, run))
    try:
        from stoker.run_report.page import write_report
    except ImportError as error:
        job.say(f"no report.html was made: it needs matplotlib (pip install 'stoker[report]'; {error})")
    else:
        job.say(f"model in {folder}, report in {write_report(folder)}")
    trainer.publish("End of training")
