"""`stoker train embed`: trains an embedding model on pairs, triplets, pairs with scores, or labelled texts.

sentence-transformers' trainer, losses and evaluators do the work, on rows that are checked and tokenized here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from stoker.errors import UserError
from stoker.tasks import training_run
from stoker.tasks.embed.evaluators import Evaluation, make_evaluation
from stoker.tasks.embed.features import Prompts, check_rows, label_scale, make_datasets, usable_for
from stoker.tasks.embed.neighbours import choose_examples
from stoker.tasks.sentences import sentence_run
from stoker.tasks.sentences.losses import DEFAULTS, LOSSES, Loss
from stoker.tasks.sentences.st_models import load_sentence_transformer, set_row_length
from stoker.tasks.sentences.text_options import TextOptions, read_corpus, read_split
from stoker.tasks.sentences.text_rows import PAIRS, TRIPLETS, TextRows
from stoker.tasks.sentences.token_table import TokenTable

# No `from __future__ import annotations`: HfArgumentParser reads the types of these fields.

__all__ = ["EmbedOptions", "arguments_of", "main"]


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

    if args.do_predict:
        raise UserError("stoker train embed does not predict a test file; use SentenceTransformer(DIR).encode(texts)")
    sentence_run.set_defaults(job)
    set_seed(args.seed)
    model = load_sentence_transformer(job.model)
    set_row_length(model, options.max_seq_length)
    dims = _dims(options.matryoshka_dims, model)
    rows = {split: read_split(job, split) for split in training_run.wanted_splits(args)}
    corpus = read_corpus(job)
    loss = _choose_loss(job, rows["train"]) if "train" in rows else None
    prompts = _prompts(job, model, rows)
    evaluation = _evaluation(job, rows["validation"], corpus, dims) if "validation" in rows else None
    shown = rows.get("validation", rows.get("train"))
    if loss is not None:
        rows["train"] = sentence_run.add_negatives(job, rows["train"], model, corpus)
        check_rows(loss, rows["train"], args.per_device_train_batch_size)
    sets, table = _datasets(job, model, rows, prompts, loss)
    trainer = _trainer(job, model, sets, table, loss, dims, evaluation)
    examples = choose_examples(shown) if options.samples and loss is not None and shown is not None else None
    metrics: dict[str, Any] = {}
    if loss is not None:
        sentence_run.measure_before(job, model, examples)
        sentence_run.train(job, trainer, loss, rows["train"].kind, LOSSES)
    if evaluation is not None and args.do_eval:
        metrics = sentence_run.evaluate(job, trainer, evaluation.metrics, len(rows["validation"]))
    sentence_run.write_examples(job, trainer, examples)
    training_run.finish(job, trainer, metrics)
    return 0


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


def _evaluation(job: training_run.Job, rows: TextRows, corpus: Sequence[str], dims: Sequence[int]) -> Evaluation:
    evaluation = make_evaluation(rows, corpus, dims, batch_size=max(32, job.args.per_device_eval_batch_size))
    sentence_run.prepare_evaluation(job, evaluation.metrics)
    return evaluation


def _trainer(
    job: training_run.Job, model: Any, sets: dict[str, Any], table: TokenTable, loss: Loss | None, dims: Sequence[int],
    evaluation: Evaluation | None,
) -> Any:  # fmt: skip
    from sentence_transformers.sentence_transformer import losses
    from sentence_transformers.sentence_transformer.data_collator import SentenceTransformerDataCollator

    from stoker.tasks.sentences.st_trainers import EmbeddingTrainer

    made = None
    if loss is not None:
        gathered = {"gather_across_devices": True} if job.data.gather_across_devices else {}
        made = sentence_run.build_loss(job, losses, loss, model, **gathered)
        if dims:
            made = losses.MatryoshkaLoss(model, made, dims)
    collator = SentenceTransformerDataCollator(preprocess_fn=table, prompts=job.args.prompts)
    return training_run.make_trainer(
        job, EmbeddingTrainer, model, model.tokenizer, sets, loss=made, data_collator=collator,
        evaluator=evaluation.evaluator if evaluation else None,
    )  # fmt: skip
