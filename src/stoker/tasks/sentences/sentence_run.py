"""What `stoker train embed`, `rerank` and `fewshot` share: defaults, the choice of the loss, training, evaluation, examples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stoker.english import counted
from stoker.errors import UserError
from stoker.hf.checkpointing import folders
from stoker.tasks import training_run
from stoker.tasks.sentences.losses import Loss, loss_for, loss_settings, make_loss
from stoker.tasks.sentences.mining import mine_negatives
from stoker.tasks.sentences.report_examples import Examples
from stoker.tasks.sentences.st_models import fast_inference
from stoker.tasks.sentences.text_rows import PAIRS, TRIPLETS, TextRows
from stoker.tasks.training_options import check_best, given

__all__ = [
    "add_negatives", "build_loss", "choose_loss", "main_first", "prepare_evaluation", "set_batches", "set_defaults",
    "train_and_evaluate", "training_settings",
]  # fmt: skip

_BATCH = {True: 64, False: 16}
"""Default batch sizes: larger where the other rows of a batch are negatives. sentence-transformers' examples use 16 to 128."""
_RATE, _WARM_UP = 2e-5, 0.1
"""sentence-transformers' advice for fine-tuning."""


def set_defaults(job: training_run.Job) -> None:
    """Options that follow from others, and defaults that differ from transformers'."""
    args, options = job.args, job.data
    if options.validation_file:
        args.do_eval = True
    if options.mine_negatives and not args.do_train:
        raise UserError("--mine_negatives is for training; leave it out, or leave out --do_train False")
    if not given("learning_rate", job.argv):
        args.learning_rate = _RATE
    if not (given("warmup_steps", job.argv) or given("warmup_ratio", job.argv)):
        args.warmup_steps = _WARM_UP


def choose_loss(job: training_run.Job, rows: TextRows, losses: Mapping[str, Loss], defaults: Mapping[str, str]) -> Loss:
    """The loss, and the settings that follow from it unless they are given."""
    args, options = job.args, job.data
    columns = ", ".join(rows.columns.names)
    if options.mine_negatives and rows.kind != PAIRS:
        raise UserError(f"--mine_negatives adds negatives to pairs, and the training data has {rows.kind} ({columns})")
    loss = loss_for(TRIPLETS if options.mine_negatives else rows.kind, columns, options.loss, losses, defaults)
    by_length = getattr(args, "train_sampling_strategy", "") == "group_by_length"
    for name, asked in (("tokens_per_batch", args.tokens_per_batch), ("group_by_length", by_length)):
        if asked and loss.sampler != "batch_sampler":
            raise UserError(
                f"--{name} is not possible with {loss.name}, whose batches are formed by other rules; leave it out and use "
                "--per_device_train_batch_size"
            )
    set_batches(job, loss)
    job.print(f"data: {rows.kind} ({columns}); loss {loss.name}")
    return loss


def set_batches(job: training_run.Job, loss: Loss) -> None:
    """The sizes of batches and how they are formed, which follow from the loss unless they are given."""
    from sentence_transformers.base.sampler import BatchSamplers

    args = job.args
    if not given("per_device_train_batch_size", job.argv):
        args.per_device_train_batch_size = _BATCH[loss.in_batch]
    if not given("per_device_eval_batch_size", job.argv):
        args.per_device_eval_batch_size = args.per_device_train_batch_size
    if not given("batch_sampler", job.argv):
        args.batch_sampler = BatchSamplers(loss.sampler)


def add_negatives(job: training_run.Job, rows: TextRows, model: Any, corpus: Sequence[str]) -> TextRows:
    """The pairs with hard negatives, if --mine_negatives asks for them; `model` embeds the texts."""
    options = job.data
    if not options.mine_negatives:
        return rows
    job.print(f"searching {options.mine_negatives} hard negatives for each of {len(rows):,} pairs")
    found = mine_negatives(
        rows, model, corpus, options.mine_negatives, margin=options.mining_margin, skip=options.mining_skip,
        optimized=job.args.optimizes, fresh=options.overwrite_cache,
    )  # fmt: skip
    if not len(found):
        raise UserError(
            f"--mine_negatives {options.mine_negatives}: no pair has that many negatives; use fewer, a smaller "
            "--mining_margin, or more texts (--corpus_file)"
        )
    if len(found) < len(rows):
        job.print(f"left out because they have fewer negatives: {counted(len(rows) - len(found), 'pair')}")
    return found


def build_loss(job: training_run.Job, module: Any, loss: Loss, model: Any, **more: Any) -> Any:
    """The loss as an object of `module`, with --loss_kwargs and --mini_batch_size."""
    settings = {**more, **loss_settings(job.data.loss_kwargs)}
    if loss.cached:
        settings = {"mini_batch_size": job.data.mini_batch_size, **settings}
    return make_loss(module, loss, model, settings)


def prepare_evaluation(job: training_run.Job, metrics: Sequence[str], *, loss: bool = True) -> None:
    """Checks options about metrics, the last of which is the main one. The model is also evaluated before training.

    `loss`: whether evaluation measures it, too.
    """
    args = job.args
    check_best(args, job.argv, main_first(metrics, loss=loss), metrics[-1])
    new = given("overwrite_output_dir", job.argv) or folders.last_good(Path(args.output_dir)) is None
    if args.do_train and not given("eval_on_start", job.argv):
        args.eval_on_start = new and not args.resume_from_checkpoint


def train_and_evaluate(
    job: training_run.Job,
    trainer: Any,
    train: Callable[[], None] | None,
    examples: Examples | None,
    names: Sequence[str],
    rows: int,
) -> dict[str, Any]:
    """Calls `train`, if there is something to train on, and returns the metrics of the validation data, which has `rows` rows.

    `names` are the metrics that are printed; examples for the report are measured before training and after it.
    """
    shown = examples if train is not None and job.args.should_save else None
    if shown is not None:
        with fast_inference(trainer.model, job.args.optimizes):
            shown.measure(trainer.model)
    if train is not None:
        train()
    metrics = _evaluate(job, trainer, names, rows) if rows and job.args.do_eval else {}
    if shown is not None:
        shown.measure(trainer.model)
        trainer.recorder.write("examples", title=shown.title, rows=shown.rows(job.data.samples))
    return metrics


def training_settings(job: training_run.Job, kind: str, loss: Loss, losses: Mapping[str, Loss]) -> dict[str, Any]:
    """Arguments of `training_run.train`: what the log says of data and loss, and what the memory check has to know."""
    cached = f"Cached{loss.name}"
    return {
        "data": kind, "loss": loss.name,
        "rows_at_once": job.data.mini_batch_size if loss.cached else None,
        "less_memory": f"--loss {cached} keeps all negatives of the batch" if cached in losses else None,
    }  # fmt: skip


def main_first(metrics: Sequence[str], *, loss: bool = True) -> list[str]:
    """The metrics of an evaluation, of which the last is the main one. `loss`: whether it measures the loss, too."""
    return [*reversed(metrics), *(["loss"] if loss else [])]


def _evaluate(job: training_run.Job, trainer: Any, names: Sequence[str], rows: int) -> dict[str, Any]:
    metrics = training_run.evaluate(trainer, rows)
    found = ", ".join(f"{name} {metrics[f'eval_{name}']:.4f}" for name in names if f"eval_{name}" in metrics)
    job.print(f"evaluation: {found} on {rows:,} rows")
    return metrics
