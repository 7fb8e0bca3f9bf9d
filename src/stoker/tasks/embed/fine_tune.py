"""`stoker train embed`: trains an embedding model on pairs, triplets, pairs with scores, or labelled texts.

sentence-transformers' trainer, losses and evaluators do the work, on rows that are checked and tokenized here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from stoker.errors import UserError
from stoker.tasks import training_run
from stoker.tasks.embed.evaluators import Evaluation, make_evaluation
from stoker.tasks.embed.features import Prompts, check_rows, label_scale, make_datasets, usable_for
from stoker.tasks.embed.neighbours import choose_examples
from stoker.tasks.fresh_models import FreshModels
from stoker.tasks.sentences import sentence_run
from stoker.tasks.sentences.losses import DEFAULTS, LOSSES, Loss
from stoker.tasks.sentences.st_models import load_sentence_transformer, set_row_length
from stoker.tasks.sentences.text_options import TextOptions, read_corpus, read_split
from stoker.tasks.sentences.text_rows import PAIRS, TRIPLETS, TextRows
from stoker.tasks.sentences.token_table import TokenTable

# No `from __future__ import annotations`: HfArgumentParser reads the types of these fields.

__all__ = ["EmbedOptions", "arguments_of", "begin", "main", "prepare"]


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


def begin(argv: list[str]) -> training_run.Job:
    job = training_run.begin("embed", argv, EmbedOptions, arguments_of(argv))
    if job.args.do_predict:
        raise UserError("stoker train embed does not predict a test file; use SentenceTransformer(DIR).encode(texts)")
    sentence_run.set_defaults(job)
    return job


@dataclass(frozen=True)
class Prepared:
    """The rows of each set, their tokens, and how they are trained on and evaluated."""

    models: FreshModels
    rows: dict[str, TextRows]
    sets: dict[str, Any]
    table: TokenTable
    prompts: dict[str, str] | None
    """By column."""
    dims: Sequence[int]
    loss: Loss | None
    """None if nothing is trained."""
    evaluation: Evaluation | None
    training: dict[str, Any]

    @property
    def metrics(self) -> Sequence[str]:
        return sentence_run.main_first(self.evaluation.metrics if self.evaluation else ())

    def trainer(self, job: training_run.Job) -> Any:
        from sentence_transformers.sentence_transformer import losses
        from sentence_transformers.sentence_transformer.data_collator import SentenceTransformerDataCollator

        from stoker.tasks.sentences.st_trainers import EmbeddingTrainer

        model, made = self.models.take(), None
        if self.loss is not None:
            sentence_run.set_batches(job, self.loss)  # this job may have others than the one that `prepare` has checked
            check_rows(self.loss, self.rows["train"], job.args.per_device_train_batch_size)
            gathered = {"gather_across_devices": True} if job.data.gather_across_devices else {}
            made = sentence_run.build_loss(job, losses, self.loss, model, **gathered)
            if self.dims:
                made = losses.MatryoshkaLoss(model, made, self.dims)
        job.args.prompts = self.prompts
        collator = SentenceTransformerDataCollator(preprocess_fn=self.table, prompts=self.prompts)
        return training_run.make_trainer(
            job, EmbeddingTrainer, model, model.tokenizer, self.sets, loss=made, data_collator=collator,
            evaluator=self.evaluation.evaluator if self.evaluation else None,
        )  # fmt: skip


def prepare(job: training_run.Job) -> Prepared:
    args = job.args
    job.announce_reading()
    rows = {split: read_split(job, split) for split in training_run.wanted_splits(args)}
    corpus = read_corpus(job)
    job.announce(f"loading the weights of {job.model.model_name_or_path}")
    models = FreshModels.of(lambda: _load(job))
    dims = _dims(job.data.matryoshka_dims, models.first)
    loss = _choose_loss(job, rows["train"]) if "train" in rows else None
    prompts = _prompts(job, models.first, rows)
    evaluation = _evaluation(job, rows["validation"], corpus, dims) if "validation" in rows else None
    if loss is not None:
        rows["train"] = sentence_run.add_negatives(job, rows["train"], models.first, corpus)
        check_rows(loss, rows["train"], args.per_device_train_batch_size)
    used = {split: one for split, one in rows.items() if loss is not None and usable_for(loss, one)}
    sets, table = _datasets(job, models.first, used, prompts, loss)
    training = sentence_run.training_settings(job, rows["train"].kind, loss, LOSSES) if loss is not None else {}
    return Prepared(models, rows, sets, table, prompts.by_column(used), dims, loss, evaluation, training)


def main(argv: list[str]) -> int:
    job = begin(argv)
    found = prepare(job)
    rows, evaluation = found.rows, found.evaluation
    shown = rows.get("validation", rows.get("train"))
    trainer = found.trainer(job)
    examples = choose_examples(shown) if job.data.samples and shown is not None else None
    train = partial(training_run.train, job, trainer, **found.training) if found.loss is not None else None
    names, count = (evaluation.metrics, len(rows["validation"])) if evaluation is not None else ((), 0)
    metrics = sentence_run.train_and_evaluate(job, trainer, train, examples, names, count)
    training_run.finish(job, trainer, metrics)
    return 0


def _load(job: training_run.Job) -> Any:
    from transformers import set_seed

    set_seed(job.args.seed)
    model = load_sentence_transformer(job.model)
    set_row_length(model, job.data.max_seq_length)
    model.prompts |= _asked_prompts(job)
    return model


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


def _choose_loss(job: training_run.Job, rows: TextRows) -> Loss:
    loss = sentence_run.choose_loss(job, rows, LOSSES, DEFAULTS)
    if job.data.gather_across_devices and not loss.gathers:
        raise UserError(
            f"--gather_across_devices is not possible with {loss.name}, which uses no other rows as negatives"
        )
    return loss


def _asked_prompts(job: training_run.Job) -> dict[str, str]:
    """--query_prompt and --document_prompt, which are saved with the model."""
    found = {name: getattr(job.data, f"{name}_prompt") for name in ("query", "document")}
    return {name: prompt for name, prompt in found.items() if prompt is not None}


def _prompts(job: training_run.Job, model: Any, rows: dict[str, TextRows]) -> Prompts:
    """The prompts of queries and documents; none for other kinds of data."""
    if not all(one.kind in (PAIRS, TRIPLETS) for one in rows.values()):
        for name in _asked_prompts(job):
            raise UserError(f"--{name}_prompt is for pairs and triplets, whose first text is a query")
        return Prompts()
    found = Prompts(*(model.prompts.get(name) or "" for name in ("query", "document")))
    if found != Prompts():
        job.print(f"prompts: {found.query!r} before queries, {found.document!r} before documents")
    return found


def _datasets(
    job: training_run.Job, model: Any, rows: dict[str, TextRows], prompts: Prompts, loss: Loss | None
) -> tuple[dict[str, Any], TokenTable]:
    scale = 1.0 if loss is None else label_scale(loss, rows["train"])
    if loss is not None and scale > 1:
        job.print(f"scores are divided by {scale:g}, because {loss.name} compares them with cosines")
    return make_datasets(rows, model, prompts, scale=scale, fresh=job.data.overwrite_cache)


def _evaluation(job: training_run.Job, rows: TextRows, corpus: Sequence[str], dims: Sequence[int]) -> Evaluation:
    evaluation = make_evaluation(rows, corpus, dims, batch_size=max(32, job.args.per_device_eval_batch_size))
    sentence_run.prepare_evaluation(job, evaluation.metrics)
    return evaluation
