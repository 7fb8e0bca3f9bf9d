"""`stoker train classify`: fine-tunes a model to classify texts or pairs of texts, or to predict a number for them."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stoker.errors import UserError
from stoker.hf.trainer import Trainer
from stoker.tasks import training_run
from stoker.tasks.classify.data import GLUE, Example, Labels
from stoker.tasks.classify.features import Rows, make_rows
from stoker.tasks.classify.labelled_examples import check_labels, split_examples
from stoker.tasks.classify.metrics import METRICS, is_combined, measure
from stoker.tasks.classify.option_rules import check_rules
from stoker.tasks.classify.worth import ConstantAnswer, tables
from stoker.tasks.loading import load_config, load_config_and_tokenizer, load_model, row_length
from stoker.tasks.shown_rows import right_and_wrong, spread
from stoker.tasks.training_options import DataOptions, check_best, check_label_names, padding_option

# No `from __future__ import annotations`: HfArgumentParser reads the types of these fields.

__all__ = ["ClassifyOptions", "begin", "main", "prepare"]

log = logging.getLogger("stoker")

_SECOND = {"validation": "validation_mm", "test": "test_mm"}
"""Names of MNLI's second evaluation and test sets, the mismatched ones."""


@dataclass
class ClassifyOptions(DataOptions):
    """Data, columns and metric."""

    task_name: str | None = field(
        default=None, metadata={"help": "A GLUE task: its columns and metric, and its data unless files are given."}
    )
    text_column_names: str | None = field(
        default=None, metadata={"help": "One or two columns with texts, separated by a comma."}
    )
    label_column_name: str | None = field(default=None, metadata={"help": "The column with the label."})
    do_regression: bool | None = field(
        default=None, metadata={"help": "The label is a number (regression).", "nargs": "?", "const": True}
    )
    metric_name: str | None = field(
        default=None, metadata={"help": "Metrics to compute, separated by commas.", "choices": None}
    )
    max_seq_length: int = field(default=128, metadata={"help": "Maximum tokens of a row; longer ones are truncated."})
    pad_to_max_length: bool = padding_option(default=True)


def predict_all_rows(args: Any) -> None:
    """Overrides options that would withhold predictions: the metrics are computed from those of all rows."""
    for name, value in (
        ("eval_do_concat_batches", True),
        ("batch_eval_metrics", False),
        ("prediction_loss_only", False),
    ):
        if getattr(args, name) != value:
            log.warning(
                "--%s %s is ignored: the metrics of this task need the predictions for all rows", name, not value
            )
            setattr(args, name, value)


def begin(argv: list[str]) -> training_run.Job:
    job = training_run.begin("classify", argv, ClassifyOptions)
    args, options = job.args, job.data
    check_rules(args, options)
    if options.task_name is not None:
        options.task_name = options.task_name.lower()
    check_label_names(args)
    predict_all_rows(args)
    check_best(args, job.argv, _metrics(_metric_names(options)), "loss")
    return job


class ClassifyTrainer(Trainer):
    """Its evaluations also log scores by class, and keep those of a constant answer beside them."""

    def __init__(self, *rest: Any, names: Sequence[str], labels: Labels | None, **named: Any) -> None:
        super().__init__(
            *rest,
            # Encoder-decoder models return hidden states beside the logits.
            preprocess_logits_for_metrics=lambda found, _: found[0] if isinstance(found, tuple) else found,
            compute_metrics=self._measure,
            **named,
        )
        self.names, self.labels = names, labels
        self.constant: ConstantAnswer | None = None
        """Of the last evaluation."""

    def _measure(self, found: Any) -> dict[str, float]:
        self._last = found
        return measure(self.names, found.predictions, found.label_ids, regression=self.labels is None)

    def evaluate(self, *rest: Any, **named: Any) -> dict[str, float]:
        metrics: dict[str, float] = super().evaluate(*rest, **named)
        true, classes = self._last.label_ids, () if self.labels is None else self.labels.names
        trained_on = getattr(self.train_dataset, "labels", None)
        known = true if trained_on is None else trained_on
        self.constant = ConstantAnswer.of(self.names, known, true, classes)
        if classes and self.args.should_save and len(true):
            shown = tables(self._last.predictions.argmax(-1), true, classes, self.constant)
            self.recorder.write("tables", step=self.state.global_step, tables=shown)
        return metrics


@dataclass(frozen=True)
class Prepared:
    """The rows of each set, their labels, and what a model for them needs."""

    sets: dict[str, Rows]
    labels: Labels | None
    """None for numbers."""
    names: Sequence[str]
    """The metrics that are printed."""
    tokenizer: Any
    config: Any

    @property
    def metrics(self) -> Sequence[str]:
        return _metrics(self.names)

    @property
    def training(self) -> dict[str, Any]:
        return {}

    def trainer(self, job: training_run.Job) -> ClassifyTrainer:
        from transformers import AutoModelForSequenceClassification, set_seed

        set_seed(job.args.seed)
        job.announce(f"loading the weights of {job.model.model_name_or_path}")
        model = load_model(AutoModelForSequenceClassification, job.model, self.config)
        trainer: ClassifyTrainer = training_run.make_trainer(
            job, ClassifyTrainer, model, self.tokenizer, self.sets, names=self.names, labels=self.labels
        )
        return trainer


def prepare(job: training_run.Job) -> Prepared:
    options = job.data
    regression = _regression(options)
    job.announce_reading()
    raw, classes = _data(job, regression)
    labels = None if regression else _labels(job, raw, classes)
    changes: dict[str, Any] = {"finetuning_task": options.task_name}
    if labels is not None and labels.names:
        changes |= {"label2id": {n: i for i, n in enumerate(labels.names)}, "id2label": dict(enumerate(labels.names))}
        changes["problem_type"] = "single_label_classification"  # the model may have been trained for another one
    else:
        changes |= {"num_labels": 1, "problem_type": "regression"}
    config, tokenizer = load_config_and_tokenizer(job.model, **changes)
    length = row_length(options.max_seq_length, tokenizer, config)
    job.announce(f"tokenizing {sum(map(len, raw.values())):,} rows")
    sets = {
        split: make_rows(examples, tokenizer, labels, max_seq_length=length, fresh=options.overwrite_cache)
        for split, examples in raw.items()
    }
    return Prepared(sets, labels, _metric_names(options), tokenizer, config)


def main(argv: list[str]) -> int:
    job = begin(argv)
    args = job.args
    found = prepare(job)
    sets, labels, names = found.sets, found.labels, found.names
    trainer = found.trainer(job)
    metrics: dict[str, Any] = {}
    if args.do_train:
        training_run.train(job, trainer, **found.training)
    if args.do_eval:
        metrics = trainer.evaluate()
        if second := sets.get(_SECOND["validation"]):
            mismatched = trainer.predict(second, metric_key_prefix="eval").metrics
            metrics |= {f"{name}_mm": value for name, value in mismatched.items()}  # as run_glue.py names them
            metrics["eval_samples_mm"] = len(second)
        trainer.save_metrics("eval", {**metrics, "eval_samples": len(sets["validation"])})
        job.print(_summary(names, metrics, len(sets["validation"])))
        if trainer.constant is not None:
            job.print(_worth(names, metrics, trainer.constant))
        if second:
            job.print(_summary(names, metrics, len(second), "_mm") + " (mismatched set)")
        if args.do_train:
            shown = _report_examples(trainer, sets["validation"], labels)  # on all ranks, like every prediction
            if args.should_save:
                trainer.recorder.write("examples", rows=shown)
    if args.do_predict:
        _predict(job, trainer, sets["test"], labels, "predict_results.txt")
        if _SECOND["test"] in sets:
            _predict(job, trainer, sets[_SECOND["test"]], labels, "predict_results_mm.txt")
    training_run.finish(job, trainer, metrics)
    return 0


def _regression(options: Any) -> bool:
    if options.do_regression is not None:
        return bool(options.do_regression)
    return options.task_name in GLUE and GLUE[options.task_name].regression


def _metrics(names: Sequence[str]) -> list[str]:
    """All that evaluation measures."""
    return [*names, *(["combined_score"] if is_combined(names) else []), "loss"]


def _metric_names(options: Any) -> list[str]:
    if options.metric_name:
        names = [name.strip() for name in options.metric_name.split(",")]
        for name in names:
            if name not in METRICS:
                raise UserError(f"--metric_name {name} is unknown; choose from {', '.join(METRICS)}")
        return names
    if options.task_name in GLUE:
        return list(GLUE[options.task_name].metrics)
    return ["mse", "pearson"] if _regression(options) else ["accuracy", "f1"]


def _summary(names: Sequence[str], metrics: dict[str, Any], rows: int, ending: str = "") -> str:
    return ", ".join(f"{name} {metrics[f'eval_{name}{ending}']:.4f}" for name in names) + f" on {rows:,} rows"


def _worth(names: Sequence[str], metrics: dict[str, Any], constant: ConstantAnswer) -> str:
    """What the scores are worth, in one line."""
    main, lower = names[0], names[0] in _LOWER_IS_BETTER
    gain = metrics[f"eval_{main}"] - constant.scores[main]
    sentence = f"for comparison: {constant.sentence(names)}"
    if (-gain if lower else gain) > 0:
        return sentence
    return (
        f"{sentence}, so the model has not learned the task yet; train for more steps or with another --learning_rate"
    )


_LOWER_IS_BETTER = ("mse",)


def _data(job: training_run.Job, regression: bool) -> tuple[dict[str, Sequence[Example]], tuple[str, ...]]:
    """The examples of every set that is needed, and the class names in order if a data set on the hub declares them."""
    raw: dict[str, Sequence[Example]] = {}
    classes: tuple[str, ...] = ()
    for split in training_run.wanted_splits(job.args):
        for number, part in enumerate(_parts(job.data, split)):
            examples, names = split_examples(job, split, part=part, task=job.data.task_name, regression=regression)
            raw[_SECOND[split] if number else split] = examples
            classes = classes or names
    return raw, classes


def _parts(options: Any, split: str) -> tuple[str, ...]:
    """The suffixes of a split's names on the hub, where GLUE has several of it."""
    from_glue = options.dataset_name is None and options.task_name in GLUE and split != "train"
    return GLUE[options.task_name].parts if from_glue and not getattr(options, f"{split}_file") else ("",)


def _labels(job: training_run.Job, raw: dict[str, Sequence[Example]], classes: tuple[str, ...]) -> Labels:
    """The classes: without training those of the model, if they cover the data; else those of the data."""
    source = raw.get("train") or raw.get("validation") or []
    known: Sequence[str] = ()
    if "train" not in raw:
        config = load_config(job.model)
        known = [config.id2label[i] for i in range(len(config.id2label))]
    labels = Labels.of(source, known, classes) if source else Labels(tuple(known))
    check_labels(labels, raw, for_numbers="--do_regression")
    return labels


def _predict(job: training_run.Job, trainer: Trainer, rows: Rows, labels: Labels | None, name: str) -> None:
    logits = trainer.predict(rows).predictions
    if not job.args.should_save:
        return
    found = logits.reshape(len(rows), -1)
    predictions = (f"{row[0]:.4f}" if labels is None else labels.names[int(row.argmax())] for row in found)
    training_run.write_predictions(job, [one.id for one in rows.examples], predictions, name)


def _report_examples(trainer: Trainer, rows: Rows, labels: Labels | None, most: int = 6) -> list[dict[str, Any]]:
    """Some right and some wrong rows for the report."""
    if labels is None:
        return []
    part = spread(len(rows), 200)
    from torch.utils.data import Subset

    logits = trainer.predict(Subset(rows, part), metric_key_prefix="shown").predictions
    shown: list[dict[str, Any]] = []
    for number, row in zip(part, logits, strict=True):
        example, prediction = rows.examples[number], labels.names[int(row.argmax())]
        right = prediction == str(example.label)
        share = float(np.exp(row - row.max()).max() / np.exp(row - row.max()).sum())
        shown.append(
            {"id": example.id, "texts": list(example.texts), "answer": prediction, "expected": [str(example.label)],
             "right": right, "probability": round(share, 4)}
        )  # fmt: skip
    return right_and_wrong(shown, most)
