"""What all `stoker train` tasks share: options, data splits, memory check, training, model card and report."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import logging
import os
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

from stoker.errors import UserError, one_line, readable
from stoker.hf.arguments import TrainingArguments
from stoker.hf.batches import lengths_of
from stoker.hf.checkpointing import folders, lock, restart, same_run
from stoker.hf.checkpointing.restart import Start
from stoker.hf.measured_rates import machine_rates
from stoker.hf.secrets import without_secrets
from stoker.hf.trainer import Trainer
from stoker.run_report.live_process import start_live
from stoker.tasks import memory_estimate, recipe
from stoker.tasks.collate import Collator
from stoker.tasks.display import use_display
from stoker.tasks.early_checks import check_request
from stoker.tasks.file_patterns import expand
from stoker.tasks.loading import quiet
from stoker.tasks.option_parser import OptionParser
from stoker.tasks.training_options import check_optimizer, given
from stoker.whole_files import write_text

__all__ = [
    "Job", "Prepared", "begin", "check_and_describe", "cut", "evaluate", "finish", "machine_rates", "make_trainer", "train",
    "wanted_splits", "write_json", "write_predictions",
]  # fmt: skip

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

    def print(self, sentence: str) -> None:
        """Prints on rank 0 only."""
        if self.args.process_index == 0:
            self.console.print(sentence)

    def announce(self, phase: str) -> None:
        """Says what takes the next seconds."""
        self.print(readable(f"{phase} ..."))

    def announce_reading(self) -> None:
        names = [name for split in wanted_splits(self.args) for name in _listed(self.source(split)[0])]
        data = self.data.dataset_name or getattr(self.data, "task_name", None)
        self.announce(f"reading {', '.join(dict.fromkeys(names)) or data or 'the data'}")

    def source(self, split: str) -> tuple[str | None, int | None]:
        """The file given for a split, if any, and the largest number of rows to use of it."""
        limit = {"validation": "eval", "test": "predict"}.get(split, split)
        return getattr(self.data, f"{split}_file"), getattr(self.data, f"max_{limit}_samples")


def _listed(names: Any) -> list[str]:
    return names if isinstance(names, list) else [names] if names else []


class Prepared(Protocol):
    """What a task has read for a command. It makes any number of trainers, each with a model of its own.

    The jobs of these trainers have the same data; `stoker tune` changes other options from one to the next.
    """

    @property
    def metrics(self) -> Sequence[str]:
        """What its evaluation measures, without `eval_`, the main one first."""

    @property
    def training(self) -> dict[str, Any]:
        """Further arguments of `train`."""

    def trainer(self, job: Job) -> Trainer: ...


def begin(task: str, argv: list[str], data_options: Any, arguments: Any = TrainingArguments) -> Job:
    """Parses the command line, checks what can be checked before loading anything, and silences the libraries."""
    _log_to_stderr()
    quiet()
    if (workers := _value("preprocessing_num_workers", argv)) is not None:
        os.environ["RAYON_NUM_THREADS"] = workers  # tokenizers reads it once, when it first tokenizes
    model, data, args = OptionParser(f"train {task}", data_options, arguments=arguments).read(argv)
    check_request(task, model, data, args, argv)
    if args.do_train:
        check_optimizer(args)
    _check_output(args)
    job = Job(task, argv, model, data, args, Console(stderr=True, highlight=False, markup=False, soft_wrap=True))
    _serve_live(job)
    return job


def _serve_live(job: Job) -> None:
    """On rank 0, which writes the log."""
    if not job.data.live or job.args.process_index != 0:
        return
    if job.args.do_train:
        job.print(start_live(Path(job.args.output_dir), job.data.live_host, job.data.live_port))
    else:
        log.warning("--live is ignored: it shows training, and --do_train is not given")


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


def _check_output(args: Any) -> None:
    """Finds early what the Trainer would report late: an unusable output folder, or a missing --report_to service."""
    from transformers.integrations import get_reporting_integration_callbacks

    try:
        Path(args.output_dir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output_dir {args.output_dir} cannot be created: {error.strerror}") from None
    if args.do_train and args.world_size == 1:
        lock.take(Path(args.output_dir)).release()  # training takes it again; fail now if another run holds it
    for name in args.report_to:
        try:
            for kind in get_reporting_integration_callbacks([name]):
                kind()
        except (ValueError, RuntimeError, ImportError) as error:
            missing = name in _SERVICES and importlib.util.find_spec(name) is None
            why = f"{name} is not installed; pip install {name}" if missing else one_line(error)
            raise UserError(f"--report_to {name}: {why}") from None


_SERVICES = ("tensorboard", "mlflow", "wandb", "trackio")
"""Services whose package has the name of the service."""


def wanted_splits(args: Any) -> list[str]:
    """The splits that this run reads. Evaluation during training needs the validation split too."""
    evaluates = args.do_eval or args.eval_strategy != "no"
    wanted = {"train": args.do_train, "validation": evaluates, "test": args.do_predict}
    return [split for split, needed in wanted.items() if needed]


def cut(rows: Sequence[Any], most: int | None) -> Sequence[Any]:
    return rows if most is None else rows[:most]


def check_and_describe(
    job: Job, trainer: Trainer, *, rows_at_once: int | None = None, less_memory: str | None = None, **facts: Any
) -> int:
    """Checks that the batches fit into memory, and tells the run's log what the run is; returns the number of rows.

    `facts` are added to the log; the others are for `check_memory`.
    """
    args = job.args
    lengths = lengths_of(trainer.train_dataset, args.length_column_name)
    optimized = getattr(args, "use_ipex", None) is not False
    if not job.data.skip_memory_check:
        need = memory_estimate.check_memory(
            trainer.model, lengths, args, optimized=optimized, rows_at_once=rows_at_once, less_memory=less_memory
        )
        job.print(f"{len(lengths):,} training rows, {int(lengths.sum()):,} tokens; about {need / 1e9:.1f} GB of memory")
    trainer.resume_arguments = ["train", job.task, *job.argv]
    trainer.recorder.task = {
        "task": job.task,
        "model": job.model.model_name_or_path,
        "command": shlex.join(job.command),
        "settings": same_run.settings_of((job.model, job.data, args)),
        **facts,
    }
    return len(lengths)


def train(job: Job, trainer: Trainer, **settings: Any) -> None:
    """Trains, then saves model, metrics and state. `settings` are those of `check_and_describe`."""
    args = job.args
    rows = check_and_describe(job, trainer, **settings)
    folder = Path(args.output_dir)
    start = Start.read(folder)
    with lock.only_run_in(folder, restarted=start.again):
        checkpoint = _resume_point(job, trainer, restarted=start.again)
        if args.should_save:
            recipe.write(folder, job.task, job.argv)
        result = trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        trainer.save_model(_internal_call=True)  # `finish` publishes it, together with card and report
        _report_training(job, trainer, result, rows)


def _resume_point(job: Job, trainer: Trainer, *, restarted: bool) -> Path | None:
    """The checkpoint to resume from; UserError, before anything is written, if this run cannot continue it. A collective."""
    args = job.args
    names = job.data.train_file or []
    files = expand([names] if isinstance(names, str) else names, "--train_file")
    trainer.origin = same_run.origin_facts(job.task, (job.model, job.data, args), trainer.model, files)
    used = bool(folders.all_checkpoints(Path(args.output_dir)))
    checkpoint = trainer.resume_point()
    if checkpoint is None and used and not folders.all_checkpoints(Path(args.output_dir)):
        job.print(f"--overwrite_output_dir: the checkpoints of an earlier run in {args.output_dir} were deleted")
    if checkpoint is None or restarted:  # an agent or a scheduler starts the same job again
        return checkpoint
    requested = bool(args.resume_from_checkpoint)
    if restart.job_is_complete(Path(args.output_dir)):
        job.print(f"the run of this job in {args.output_dir} is complete; there is nothing to do")
        raise SystemExit(0)
    trainer.require_same_run(checkpoint, requested=requested)
    if not requested:
        job.print(f"resuming from {checkpoint} (--overwrite_output_dir starts over)")
    return checkpoint


def _report_training(job: Job, trainer: Trainer, result: Any, rows: int) -> None:
    metrics, history = {**result.metrics, "train_samples": rows}, trainer.state.log_history
    if result.global_step > trainer.recorder.began_at:
        seconds, loss = metrics.get("train_runtime", 0.0), metrics.get("train_loss", 0.0)
        job.print(f"trained to step {result.global_step:,} in {seconds:,.0f} s, mean loss {loss:.3f}")
    else:
        job.print(f"no step was left to train after step {result.global_step:,}")
        metrics = {name: value for name, value in metrics.items() if name not in _OF_STEPS}
        history[-1:] = [one for one in history[-1:] if "train_runtime" not in one]
    if job.args.should_save:
        trainer.save_metrics("train", metrics)
        trainer.save_state()


_OF_STEPS = ("train_loss", "train_runtime", "train_samples_per_second", "train_steps_per_second")
"""Figures of the steps that were trained, which are 0 if a run was stopped after its last one."""


def evaluate(trainer: Any, examples: int) -> dict[str, Any]:
    """The metrics of the validation data, which has so many examples; they are saved, too."""
    metrics: dict[str, Any] = trainer.evaluate()
    trainer.save_metrics("eval", {**metrics, "eval_samples": examples})  # on the first rank only
    return metrics


def make_trainer(
    job: Job, kind: type[Trainer], model: Any, tokenizer: Any, sets: dict[str, Any], **settings: Any
) -> Any:
    """The Trainer of a task, with our progress display; it logs often enough to draw a curve (about 100 points)."""
    args = job.args
    args.remove_unused_columns = False  # items contain only what the model takes
    if args.process_index == 0 and args.do_train:
        machine_rates(job.print)  # logs show the share of the machine's peak
    try:
        trainer = kind(
            model, args, train_dataset=sets.get("train"), eval_dataset=sets.get("validation"), processing_class=tokenizer,
            **{"data_collator": Collator.of(tokenizer), **settings},
        )  # fmt: skip
    except (ValueError, ImportError) as error:  # raised for options that contradict each other
        raise UserError(f"stoker train {job.task}: {one_line(error)}") from None
    use_display(trainer, job.console.file)
    if not given("logging_steps", job.argv) and args.do_train:
        rows_per_step = args.train_batch_size * args.gradient_accumulation_steps
        steps = (
            args.max_steps if args.max_steps > 0 else args.num_train_epochs * len(trainer.train_dataset) / rows_per_step
        )
        args.logging_steps = max(int(steps / 100), 1)
    return trainer


def write_json(path: Path, content: Any) -> None:
    """Writes atomically, so that a kill cannot leave half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def write_predictions(
    job: Job, ids: Sequence[str], predictions: Iterable[str], name: str = "predict_results.txt"
) -> None:
    """Writes the predictions of the test file, one per line after its id."""
    path = Path(job.args.output_dir) / name
    lines = (f"{one}\t{prediction}\n" for one, prediction in zip(ids, predictions, strict=True))
    write_text(path, "index\tprediction\n" + "".join(lines))
    job.print(f"{len(ids):,} predictions in {path}")


def finish(job: Job, trainer: Trainer, metrics: dict[str, Any]) -> None:
    """Writes model card and report, and publishes everything to the hub if --push_to_hub is set."""
    if not job.args.should_save or not job.args.do_train:
        return
    from stoker.run_report.log import read_run

    folder = Path(job.args.output_dir)
    try:
        run = read_run(folder)
    except OSError:  # the log could not be written
        return
    from stoker.tasks.card import model_card

    write_text(folder / "README.md", model_card(job, trainer, metrics, run))
    try:
        from stoker.run_report.page import write_report
    except ImportError as error:
        job.print(
            f"report.html was not written: {one_line(error)}; install what it needs with pip install 'stoker[report]'"
        )
    else:
        job.print(f"model in {folder}, report in {write_report(folder)}")
    trainer.publish("End of training")
    trainer.recorder.write("complete")
