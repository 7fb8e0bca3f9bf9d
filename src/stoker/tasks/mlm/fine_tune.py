"""`stoker train mlm`: continues the pre-training of a model on texts of any size, by masked words."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from stoker.distributed.agreement import once_per_machine, several_ranks
from stoker.english import counted
from stoker.errors import UserError
from stoker.tasks import hub, training_run
from stoker.tasks.file_patterns import expand
from stoker.tasks.loading import load_config_and_tokenizer, load_model, row_length
from stoker.tasks.mlm.features import TextRows, make_rows, tokenize_sources
from stoker.tasks.mlm.option_rules import check_rules
from stoker.tasks.mlm.texts import FileTexts, HubTexts, Source
from stoker.tasks.training_options import DataOptions, check_best, given, padding_option

# No `from __future__ import annotations`: HfArgumentParser reads the types of these fields.

__all__ = ["MlmOptions", "begin", "main", "prepare"]

_METRICS = ("loss", "perplexity", "masked_accuracy")


@dataclass
class MlmOptions(DataOptions):
    """Texts, rows and masks."""

    train_file: list[str] | None = field(  # type: ignore[assignment]  # several, where other tasks have one
        default=None, metadata={"help": "Texts to train on: text files, JSON lines, CSV, Parquet; names or patterns."}
    )
    validation_file: list[str] | None = field(  # type: ignore[assignment]
        default=None, metadata={"help": "Texts to evaluate on."}
    )
    text_column_name: str | None = field(
        default=None, metadata={"help": "The column with the texts in tables and data sets."}
    )
    validation_split_percentage: int = field(
        default=5, metadata={"help": "The share of the rows to evaluate on, if there are no texts for it."}
    )
    line_by_line: bool = field(
        default=False, metadata={"help": "A row per line, instead of rows of the same length from all lines together."}
    )
    max_seq_length: int | None = field(
        default=None, metadata={"help": "Tokens of a row (default: what the model takes, at most 512)."}
    )
    masking: str = field(
        default="tokens",
        metadata={
            "help": "What is masked: single tokens, whole words, or spans of several words.",
            "choices": ["tokens", "words", "spans"],
        },
    )
    mlm_probability: float = field(default=0.15, metadata={"help": "The share of tokens to mask."})
    pad_to_max_length: bool = padding_option(default=False)


def begin(argv: list[str]) -> training_run.Job:
    job = training_run.begin("mlm", argv, MlmOptions)
    _check(job)
    return job


@dataclass(frozen=True)
class Prepared:
    """The rows of each set, and what a model for them needs."""

    sets: dict[str, TextRows]
    options: MlmOptions
    tokenizer: Any
    config: Any

    @property
    def metrics(self) -> Sequence[str]:
        return _METRICS

    @property
    def training(self) -> dict[str, Any]:
        return {"masking": self.options.masking}

    def trainer(self, job: training_run.Job) -> Any:
        from transformers import AutoModelForMaskedLM, set_seed

        from stoker.tasks.mlm.masked_trainer import MlmTrainer
        from stoker.tasks.mlm.masking import MaskingCollator

        set_seed(job.args.seed)
        job.announce(f"loading the weights of {job.model.model_name_or_path}")
        model = load_model(AutoModelForMaskedLM, job.model, self.config)
        collator = MaskingCollator(self.tokenizer, self.options.masking, self.options.mlm_probability)
        return training_run.make_trainer(job, MlmTrainer, model, self.tokenizer, self.sets, data_collator=collator)


def prepare(job: training_run.Job) -> Prepared:
    options = job.data
    config, tokenizer = load_config_and_tokenizer(job.model)
    if tokenizer.mask_token is None:
        raise UserError(
            f"the tokenizer of {job.model.model_name_or_path} has no mask token, so this is no model for masked words; "
            "`stoker train sft` trains language models on texts"
        )
    length = row_length(options.max_seq_length, tokenizer, config)
    job.announce_reading()
    return Prepared(_sets(job, tokenizer, length), options, tokenizer, config)


def main(argv: list[str]) -> int:
    from stoker.tasks.mlm.mask_samples import samples

    job = begin(argv)
    args = job.args
    found = prepare(job)
    sets = found.sets
    trainer = found.trainer(job)
    metrics: dict[str, Any] = {}
    if args.do_train:
        training_run.train(job, trainer, **found.training)
    if args.do_eval:
        metrics = training_run.evaluate(trainer, len(sets["validation"]))
        job.print(_summary(metrics, len(sets["validation"])))
    if args.do_train and args.should_save:
        shown = sets.get("validation", sets["train"])
        trainer.recorder.write("examples", rows=samples(trainer, shown))
    training_run.finish(job, trainer, metrics)
    return 0


def _check(job: training_run.Job) -> None:
    args, options = job.args, job.data
    check_rules(args, options)
    if str(args.metric_for_best_model).endswith("perplexity") and not given("greater_is_better", job.argv):
        args.greater_is_better = False  # transformers knows this of losses only
    check_best(args, job.argv, _METRICS, "loss")


def _sets(job: training_run.Job, tokenizer: Any, length: int) -> dict[str, TextRows]:
    options = job.data
    wanted = training_run.wanted_splits(job.args)
    if options.train_file or options.validation_file:
        separate = bool(options.validation_file)
    else:
        separate = hub.has_split(options.dataset_name, options.dataset_config_name, "validation", job.model)
    read = [split for split in wanted if separate or split != "validation"]
    sets = {split: _rows(job, tokenizer, split, length) for split in read}
    if "validation" in wanted and not separate:
        rows = sets.get("train") or _rows(job, tokenizer, "train", length)
        held = len(rows) * options.validation_split_percentage // 100
        if not 0 < held < len(rows):
            raise UserError(
                f"the texts make {counted(len(rows), 'row')}, of which --validation_split_percentage "
                f"{options.validation_split_percentage} leaves none to evaluate on, or none to train on; name texts with "
                "--validation_file"
            )
        sets["validation"] = rows.part(0, held)
        if "train" in sets:
            sets["train"] = rows.part(held, len(rows) - held)
    return {split: rows.part(0, job.source(split)[1] or len(rows)) for split, rows in sets.items()}


def _rows(job: training_run.Job, tokenizer: Any, split: str, length: int) -> TextRows:
    options = job.data
    sources = _sources(job, split)

    def tokens(fresh: bool) -> Any:
        return tokenize_sources(sources, tokenizer, strict=options.strict, fresh=fresh, say=job.print)

    fresh = options.overwrite_cache
    if several_ranks():  # one process of each machine tokenizes, and the others find the result in the cache
        once_per_machine(lambda: tokens(fresh), first_of_machine=job.args.local_process_index == 0)
        fresh = False
    return make_rows(tokens(fresh), tokenizer, max_seq_length=length, line_by_line=options.line_by_line)


def _sources(job: training_run.Job, split: str) -> list[Source]:
    options = job.data
    files, _ = job.source(split)
    if files:
        return [FileTexts(path, options.text_column_name) for path in expand(files, f"--{split}_file")]
    found = hub.load_split(options.dataset_name, options.dataset_config_name, split, job.model)
    return [HubTexts(found, options.text_column_name)]


def _summary(metrics: dict[str, Any], rows: int) -> str:
    return (
        f"perplexity {metrics['eval_perplexity']:.2f}, {metrics['eval_masked_accuracy']:.1%} of the masked tokens right "
        f"on {counted(rows, 'row')}"
    )
