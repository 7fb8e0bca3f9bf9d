"""`stoker train embed`: trains an embedding model on pairs, triplets, pairs with scores, or labelled texts.

sentence-transformers' trainer, losses and evaluators do the work, on rows that are checked and tokenized here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stoker.errors import UserError
from stoker.hf.checkpointing import folders
from stoker.tasks import training_run
from stoker.tasks.embed.evaluators import Evaluation, make_evaluation
from stoker.tasks.embed.features import Prompts, check_rows, label_scale, make_datasets, usable_for
from stoker.tasks.embed.neighbours import choose_examples
from stoker.tasks.sentences.losses import LOSSES, Loss, loss_for, loss_settings, make_loss
from stoker.tasks.sentences.mining import mine_negatives
from stoker.tasks.sentences.st_models import fast_inference, load_sentence_transformer, set_row_length
from stoker.tasks.sentences.text_options import TextOptions, read_corpus, read_split
from stoker.tasks.sentences.text_rows import PAIRS, TRIPLETS, TextRows
from stoker.tasks.sentences.token_table import TokenTable
from stoker.tasks.training_options import check_best, given

# No `from __future__ import annotations`: HfArgumentParser reads the types of these fields.

__all__ = ["EmbedOptions", "arguments_of", "main"]

_BATCH = {True: 64, False: 16}
"""Default batch sizes: larger where the other rows of a batch are negatives. sentence-transformers' examples use 16 to 128."""
_RATE, _WARM_UP = 2e-5, 0.1
"""sentence-transformers' advice for fine-tuning."""


@dataclass
class EmbedOptions(TextOptions):
    """What is trained on."""

    matryoshka_dims: str | None = field(
        default=None,
        metadata={"help": "Train embeddings that can be cut to these dimensions, separated by commas: 256,128,64."},
    )
    gather_across_devices: bool = field(
        default=False, metadata={"help": "With several processes, use the rows of all of them as negatives."}
    )
    query_prompt: str | None = field(
        default=None, metadata={"help": "Put before the first text of pairs and triplets (default: the model's own)."}
    )
    document_prompt: str | None = field(
        default=None, metadata={"help": "Put before the other texts of pairs and triplets (default: the model's own)."}
    )


def arguments_of(argv: Sequence[str]) -> Any:
    """The class of the training arguments."""
    from stoker.tasks.sentences.st_trainers import EmbeddingArguments

    return EmbeddingArguments


def main(argv: list[str]) -> int:
    job = training_run.begin("embed", argv, EmbedOptions, arguments_of(argv))
    args, options = job.args, job.data
    from transformers import set_seed

    _check(job)
    set_seed(args.seed)
    model = load_sentence_transformer(job.model)
    set_row_length(model, options.max_seq_length)
    dims = _dims(options.matryoshka_dims, model)
    rows = {split: read_split(job, split) for split in training_run.wanted_splits(args)}
    corpus = read_corpus(job)
    loss = _choose_loss(job, rows.get("train"))
    prompts = _prompts(job, model, rows)
    shown = rows.get("validation", rows.get("train"))
    evaluation = _evaluation(job, rows.get("validation"), corpus, dims, model)
    if options.mine_negatives:
        rows["train"] = _mine(job, rows["train"], model, corpus)
    if loss is not None:
        check_rows(loss, rows["train"], args.per_device_train_batch_size)
    sets, table = _datasets(job, model, rows, prompts, loss)
    trainer = _trainer(job, model, sets, table, loss, dims, evaluation)
    examples = choose_examples(shown) if options.samples and args.do_train and shown is not None else None
    if examples is not None and args.should_save:
        with fast_inference(model, args.optimizes):
            examples.measure(model)
    if args.do_train and loss is not None:
        _train(job, trainer, loss, rows["train"])
    metrics = _evaluate(job, trainer, evaluation, rows) if evaluation is not None and args.do_eval else {}
    if examples is not None and args.should_save:
        examples.measure(trainer.model)
        trainer.recorder.write("examples", title=examples.title, rows=examples.rows(options.samples))
    training_run.finish(job, trainer, metrics)
    return 0


def _check(job: training_run.Job) -> None:
    args, options = job.args, job.data
    if args.do_predict:
        raise UserError("stoker train embed does not predict a test file; use SentenceTransformer(DIR).encode(texts)")
    if options.validation_file:
        args.do_eval = True
    if options.mine_negatives and not args.do_train:
        raise UserError("--mine_negatives is for training; leave it out, or leave out --do_train False")
    if not given("learning_rate", job.argv):
        args.learning_rate = _RATE
    if not (given("warmup_steps", job.argv) or given("warmup_ratio", job.argv)):
        args.warmup_steps = _WARM_UP


def _dims(text: str | None, model: Any) -> list[int]:
    """--matryoshka_dims, with the full dimension."""
    if text is None:
        return []
    full = int(model.get_embedding_dimension())
    try:
        dims = {int(one) for one in text.split(",")}
    except ValueError:
        dims = {0}
    if not all(0 < dim <= full for dim in dims):
        raise UserError(
            f"--matryoshka_dims {text}: write numbers from 1 to {full}, the model's own, separated by commas"
        )
    return sorted({full, *dims}, reverse=True)


def _choose_loss(job: training_run.Job, rows: TextRows | None) -> Loss | None:
    """The loss, and the settings that follow from it unless they are given."""
    from sentence_transformers.base.sampler import BatchSamplers

    args, options = job.args, job.data
    if rows is None:
        return None
    kind = rows.kind
    columns = ", ".join(rows.columns.names)
    if options.mine_negatives:
        if kind != PAIRS:
            raise UserError(f"--mine_negatives adds negatives to pairs, and the training data has {kind} ({columns})")
        kind = TRIPLETS
    loss = loss_for(kind, columns, options.loss)
    if options.gather_across_devices and not loss.gathers:
        raise UserError(
            f"--gather_across_devices is not possible with {loss.name}, which uses no other rows as negatives"
        )
    by_length = getattr(args, "train_sampling_strategy", "") == "group_by_length"
    for name, asked in (("tokens_per_batch", args.tokens_per_batch), ("group_by_length", by_length)):
        if asked and loss.sampler != "batch_sampler":
            raise UserError(
                f"--{name} is not possible with {loss.name}, whose batches are formed by other rules; leave it out and use "
                "--per_device_train_batch_size"
            )
    if not given("per_device_train_batch_size", job.argv):
        args.per_device_train_batch_size = _BATCH[loss.in_batch]
    if not given("per_device_eval_batch_size", job.argv):
        args.per_device_eval_batch_size = args.per_device_train_batch_size
    if not given("batch_sampler", job.argv):
        args.batch_sampler = BatchSamplers(loss.sampler)
    job.print(f"data: {rows.kind} ({columns}); loss {loss.name}")
    return loss


def _mine(job: training_run.Job, rows: TextRows, model: Any, corpus: Sequence[str]) -> TextRows:
    options = job.data
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
        job.print(f"{len(rows) - len(found):,} pairs have fewer negatives and are left out")
    return found


def _prompts(job: training_run.Job, model: Any, rows: dict[str, TextRows]) -> Prompts:
    """The prompts of queries and documents, which are saved with the model; none for other kinds of data."""
    ordered = all(one.kind in (PAIRS, TRIPLETS) for one in rows.values())
    for name in ("query", "document"):
        if (prompt := getattr(job.data, f"{name}_prompt")) is not None:
            if not ordered:
                raise UserError(f"--{name}_prompt is for pairs and triplets, whose first text is a query")
            model.prompts[name] = prompt
    if not ordered:
        return Prompts()
    found = Prompts(*(model.prompts.get(name) or "" for name in ("query", "document")))
    if found != Prompts():
        job.print(f"prompts: {found.query!r} before queries, {found.document!r} before documents")
    return found


def _datasets(
    job: training_run.Job, model: Any, rows: dict[str, TextRows], prompts: Prompts, loss: Loss | None
) -> tuple[dict[str, Any], TokenTable]:
    used = {split: one for split, one in rows.items() if loss is not None and usable_for(loss, one)}
    job.args.prompts = prompts.by_column(used)
    scale = 1.0 if loss is None else label_scale(loss, rows["train"])
    if loss is not None and scale > 1:
        job.print(f"scores are divided by {scale:g}, because {loss.name} compares them with cosines")
    return make_datasets(used, model, prompts, scale=scale, fresh=job.data.overwrite_cache)


def _evaluation(
    job: training_run.Job, rows: TextRows | None, corpus: Sequence[str], dims: Sequence[int], model: Any
) -> Evaluation | None:
    """The evaluator for the validation data; the model is also evaluated before training."""
    args = job.args
    if rows is None:
        return None
    evaluation = make_evaluation(rows, corpus, dims, batch_size=max(32, args.per_device_eval_batch_size))
    check_best(args, job.argv, ["loss", *evaluation.metrics], evaluation.metrics[-1])
    fresh = given("overwrite_output_dir", job.argv) or folders.last_good(Path(args.output_dir)) is None
    if args.do_train and not given("eval_on_start", job.argv):
        args.eval_on_start = fresh and not args.resume_from_checkpoint
    return evaluation


def _trainer(
    job: training_run.Job, model: Any, sets: dict[str, Any], table: TokenTable, loss: Loss | None, dims: Sequence[int],
    evaluation: Evaluation | None,
) -> Any:  # fmt: skip
    from sentence_transformers.sentence_transformer import losses
    from sentence_transformers.sentence_transformer.data_collator import SentenceTransformerDataCollator

    from stoker.tasks.sentences.st_trainers import EmbeddingTrainer

    options = job.data
    made = None
    if loss is not None:
        settings = loss_settings(options.loss_kwargs)
        if loss.cached:
            settings = {"mini_batch_size": options.mini_batch_size, **settings}
        if options.gather_across_devices:
            settings["gather_across_devices"] = True
        made = make_loss(losses, loss, model, settings)
        if dims:
            made = losses.MatryoshkaLoss(model, made, dims)
    collator = SentenceTransformerDataCollator(preprocess_fn=table, prompts=job.args.prompts)
    return training_run.make_trainer(
        job, EmbeddingTrainer, model, model.tokenizer, sets, loss=made, data_collator=collator,
        evaluator=evaluation.evaluator if evaluation else None,
    )  # fmt: skip


def _train(job: training_run.Job, trainer: Any, loss: Loss, rows: TextRows) -> None:
    cached = f"Cached{loss.name}"
    training_run.train(
        job, trainer, data=rows.kind, loss=loss.name,
        rows_at_once=job.data.mini_batch_size if loss.cached else None,
        less_memory=f"--loss {cached} keeps all negatives of the batch" if cached in LOSSES else None,
    )  # fmt: skip


def _evaluate(job: training_run.Job, trainer: Any, evaluation: Evaluation, rows: dict[str, TextRows]) -> dict[str, Any]:
    metrics: dict[str, Any] = trainer.evaluate()
    count = len(rows["validation"])
    trainer.save_metrics("eval", {**metrics, "eval_samples": count})
    found = ", ".join(
        f"{name} {metrics[f'eval_{name}']:.4f}" for name in evaluation.metrics if f"eval_{name}" in metrics
    )
    job.print(f"evaluation: {found} on {count:,} rows")
    return metrics
