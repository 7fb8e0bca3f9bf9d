"""`stoker train ner`: fine-tunes a model to find named entities, evaluates it by entity F1, predicts."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stoker.english import counted
from stoker.errors import UserError
from stoker.tasks import hub, training_run
from stoker.tasks.faults import Faults
from stoker.tasks.loading import load_config, load_config_and_tokenizer, load_model, row_length
from stoker.tasks.ner.data import Columns, Layout, Sentence, collect, converted, read_sentences
from stoker.tasks.ner.features import Rows, make_rows
from stoker.tasks.ner.metrics import Entity, Scores, entities_of, measure
from stoker.tasks.ner.predictions import entity_spans, write_predictions
from stoker.tasks.ner.tags import OUTSIDE, Scheme, iob2, recognise, type_of
from stoker.tasks.row_predictions import predict_rows
from stoker.tasks.scoring_trainer import ScoringTrainer
from stoker.tasks.shown_rows import right_and_wrong
from stoker.tasks.training_options import DataOptions, check_best, check_label_names, overlap_option, padding_option

# No `from __future__ import annotations`: HfArgumentParser reads the types of these fields.

__all__ = ["NerOptions", "NerTrainer", "begin", "main", "prepare"]

log = logging.getLogger("stoker")

_METRICS = ("loss", "precision", "recall", "f1", "accuracy")


@dataclass
class NerOptions(DataOptions):
    """Data, columns and labels."""

    text_column_name: str | None = field(
        default=None, metadata={"help": "The column with the words or the text; in a CoNLL file its number, from 1."}
    )
    label_column_name: str | None = field(
        default=None, metadata={"help": "The column with the tags or entities; in a CoNLL file its number, from 1."}
    )
    max_seq_length: int | None = field(
        default=None, metadata={"help": "Maximum tokens of a window (default: what the model takes, at most 512)."}
    )
    doc_stride: int = overlap_option(64)
    label_all_tokens: bool = field(
        default=False, metadata={"help": "Train on all tokens of a word instead of its first one."}
    )
    return_entity_level_metrics: bool = field(
        default=False, metadata={"help": "Metrics of each entity type, too; the report always has them."}
    )
    pad_to_max_length: bool = padding_option(default=False)


@dataclass(frozen=True)
class Labels:
    """The tags that a model predicts, in order, and their scheme."""

    names: tuple[str, ...]
    scheme: Scheme

    @property
    def outside(self) -> int:
        return self.names.index(OUTSIDE)


class NerTrainer(ScoringTrainer):
    """Evaluates by joining the predictions of all windows; reports precision, recall and F1 of entities."""

    def __init__(self, *rest: Any, labels: Labels, by_type: bool, **named: Any) -> None:
        super().__init__(*rest, preprocess_logits_for_metrics=_best_labels, **named)
        self.labels = labels
        self.by_type = by_type
        self.scores: Scores | None = None
        """Of the last evaluation."""

    def tags(self, rows: Rows, description: str, prefix: str = "eval") -> tuple[list[list[str]], dict[str, float]]:
        """The predicted tag of each word of each sentence, and the loss if the rows have labels."""
        found, metrics = predict_rows(self, rows, description, metric_key_prefix=prefix)
        names = self.labels.names
        numbers = rows.by_word([labels for (labels,) in found], self.labels.outside)
        return [[names[number] for number in sentence.tolist()] for sentence in numbers], metrics

    def score(self, rows: Rows, prefix: str) -> tuple[dict[str, float], int]:
        predicted, metrics = self.tags(rows, "Evaluation", prefix)
        scheme = self.labels.scheme
        true = [sentence.tags or () for sentence in rows.sentences]
        scores = measure(true, predicted, scheme)
        self.scores = scores
        if self.args.should_save:
            shown = examples(rows.sentences, entities_of(true, scheme), entities_of(predicted, scheme))
            self.recorder.write("examples", step=self.state.global_step, rows=shown)
            self.recorder.write("tables", step=self.state.global_step, tables=scores.tables())
        loss = {"loss": metrics[f"{prefix}_loss"]} if f"{prefix}_loss" in metrics else {}
        return {**loss, **scores.flat(by_type=self.by_type)}, len(rows.sentences)


def _best_labels(logits: Any, _: Any) -> Any:
    """The most likely label of each token; the logits of all labels would be kept until the end."""
    return (logits[0] if isinstance(logits, tuple) else logits).argmax(-1)


def begin(argv: list[str]) -> training_run.Job:
    job = training_run.begin("ner", argv, NerOptions)
    check_best(job.args, job.argv, _METRICS, "f1")
    check_label_names(job.args)
    return job


@dataclass(frozen=True)
class Prepared:
    """The rows of each set, their labels, and what a model for them needs."""

    sets: dict[str, Rows]
    labels: Labels
    layouts: dict[str, Layout]
    """How the file of each set is laid out."""
    by_type: bool
    tokenizer: Any
    config: Any

    @property
    def metrics(self) -> Sequence[str]:
        return sorted(_METRICS, key=lambda name: name != "f1")

    @property
    def training(self) -> dict[str, Any]:
        return {}

    def trainer(self, job: training_run.Job) -> NerTrainer:
        from transformers import AutoModelForTokenClassification, set_seed

        set_seed(job.args.seed)
        job.announce(f"loading the weights of {job.model.model_name_or_path}")
        model = load_model(AutoModelForTokenClassification, job.model, self.config)
        trainer: NerTrainer = training_run.make_trainer(
            job, NerTrainer, model, self.tokenizer, self.sets, labels=self.labels, by_type=self.by_type
        )
        return trainer


def prepare(job: training_run.Job) -> Prepared:
    args, options = job.args, job.data
    job.announce_reading()
    raw = {split: _read(job, split) for split in training_run.wanted_splits(args)}
    labels = _labels(job, raw)
    sentences = {split: _converted(job, split, data, labels) for split, data in raw.items()}
    numbers = {name: number for number, name in enumerate(labels.names)}
    config, tokenizer = load_config_and_tokenizer(
        job.model, label2id=numbers, id2label=dict(enumerate(labels.names)), finetuning_task="ner"
    )
    length = row_length(options.max_seq_length, tokenizer, config)
    job.announce(f"tokenizing {sum(map(len, sentences.values())):,} sentences")
    sets = {
        split: make_rows(
            one, tokenizer, labels.names, max_seq_length=length, doc_stride=options.doc_stride,
            all_tokens=options.label_all_tokens and split == "train", fresh=options.overwrite_cache,
        )
        for split, one in sentences.items()
    }  # fmt: skip
    layouts = {split: data[0] for split, data in raw.items()}
    return Prepared(sets, labels, layouts, options.return_entity_level_metrics, tokenizer, config)


def main(argv: list[str]) -> int:
    job = begin(argv)
    args = job.args
    found = prepare(job)
    sets = found.sets
    trainer = found.trainer(job)
    metrics: dict[str, Any] = {}
    if args.do_train:
        training_run.train(job, trainer, **found.training)
    if args.do_eval:
        metrics = training_run.evaluate(trainer, len(sets["validation"].sentences))
        job.print(_summary(metrics, len(sets["validation"].sentences)))
        if trainer.scores is not None:
            job.print(_worth(trainer.scores))
    if args.do_predict:
        _predict(job, trainer, sets["test"], found.layouts["test"])
    training_run.finish(job, trainer, metrics)
    return 0


def _read(job: training_run.Job, split: str) -> tuple[Layout, Sequence[Sentence], Faults, tuple[str, ...]]:
    """The sentences of a split with the tags of the data, and the names of the tags if a data set on the hub declares them."""
    options = job.data
    file, most = job.source(split)
    columns = Columns(options.text_column_name, options.label_column_name)
    labelled = split != "test"
    if file:
        faults = Faults(file, options.strict)
        layout, sentences = read_sentences(file, columns, faults, labelled=labelled)
        return layout, training_run.cut(sentences, most), faults, ()
    found = hub.load_split(options.dataset_name, options.dataset_config_name, split, job.model)
    faults = Faults(found.name, options.strict)
    layout, sentences = collect(found.rows(), columns, faults, labelled=labelled)
    return layout, training_run.cut(sentences, most), faults, found.columns.get(layout.label, ())


def _labels(job: training_run.Job, raw: dict[str, Any]) -> Labels:
    """The tags: without training those of the model; else all tags of the types in the training data."""
    if "train" not in raw:
        config = load_config(job.model)
        known = tuple(config.id2label[i] for i in range(len(config.id2label)))
        if OUTSIDE not in known:
            raise UserError(
                f"{job.model.model_name_or_path} is not trained to find entities: its labels are {', '.join(known[:5])}"
            )
        return Labels(known, recognise([known]))
    _, sentences, _, declared = raw["train"]
    scheme = recognise(sentence.tags for sentence in sentences)
    if scheme.source:
        what = {"IOB1": "IOB1, or begin with I-", "types": "types without B- and I-"}[scheme.source]
        job.print(f"the tags are {what}; they are converted to IOB2")
    types = {type_of(tag) for sentence in sentences for tag in iob2(sentence.tags) if tag != OUTSIDE}
    names = ", ".join(sorted(types)[:8]) + (", ..." if len(types) > 8 else "")
    job.print(f"data: {len(sentences):,} sentences, {scheme.name}, entities of {counted(len(types), 'type')} ({names})")
    if declared and not scheme.source and {*scheme.labels(types)} <= {*declared}:
        return Labels(declared, scheme)
    return Labels(scheme.labels(types), scheme)


def _converted(job: training_run.Job, split: str, data: Any, labels: Labels) -> list[Sentence]:
    """The sentences of a split with tags in the scheme of the model; reports the rows that cannot be used."""
    _, sentences, faults, _ = data
    done = converted(sentences, labels.scheme, faults)
    faults.settle(len(done))
    strange = sorted({tag for sentence in done for tag in sentence.tags or ()} - {*labels.names})
    if strange:
        types = ", ".join(dict.fromkeys(map(type_of, strange)))
        where = "the training data does not have" if job.args.do_train else "the model does not know"
        log.warning("the %s data has entities of types that %s (%s); they count as not found", split, where, types)
    return done


def _summary(metrics: dict[str, Any], sentences: int) -> str:
    names = ("precision", "recall", "f1")
    return ", ".join(f"{name} {metrics[f'eval_{name}']:.4f}" for name in names) + f" on {sentences:,} sentences"


def _worth(scores: Scores) -> str:
    """What the scores are worth, in one line: most words are in no entity, so accuracy is high from the start."""
    sentence = (
        f"accuracy {scores.accuracy:.4f} of words; for comparison: tagging nothing scores {scores.untagged:.4f}, f1 0"
    )
    if scores.f1 > 0:
        return sentence
    return (
        f"{sentence}, so the model has not learned the task yet; train for more steps or with another --learning_rate"
    )


def _predict(job: training_run.Job, trainer: NerTrainer, rows: Rows, layout: Layout) -> None:
    predicted, _ = trainer.tags(rows, "Prediction", "predict")
    if not job.args.should_save:
        return
    found = entities_of(predicted, trainer.labels.scheme)
    path = write_predictions(Path(job.args.output_dir), layout, rows.sentences, predicted, found, trainer.labels.names)
    job.print(f"{sum(map(len, found)):,} entities in {len(predicted):,} sentences; the predictions are in {path}")


def examples(
    sentences: Sequence[Sentence], true: Sequence[Sequence[Entity]], found: Sequence[Sequence[Entity]], most: int = 6
) -> list[dict[str, Any]]:
    """Some sentences with right and some with wrong entities for the report."""
    rows: list[dict[str, Any]] = []
    for sentence, expected, predicted in zip(sentences, true, found, strict=True):
        if not expected and not predicted:
            continue
        good = list(expected) == list(predicted)
        marks = [
            {"begin": span["start"], "end": span["end"], "label": span["label"], "right": entity in expected}
            for entity, span in zip(predicted, entity_spans(sentence, predicted), strict=True)
        ]
        missed = entity_spans(sentence, [entity for entity in expected if entity not in predicted])
        rows.append(
            {"context": sentence.text, "marks": marks, "right": good,
             "expected": [f"{span['text']} ({span['label']})" for span in missed]}
        )  # fmt: skip
    return right_and_wrong(rows, most)
