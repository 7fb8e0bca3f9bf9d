"""`stoker train fewshot`: trains a classifier on a few examples of each class, by SetFit's method.

SetFit chooses the examples, makes the pairs and fits the classifier. The embeddings are trained by sentence-transformers' trainer
with what Stoker adds, because SetFit's own trainer has few options and cannot resume.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from stoker.errors import UserError
from stoker.tasks import training_run
from stoker.tasks.classify.data import Example, Labels
from stoker.tasks.classify.labelled_examples import check_labels, split_examples
from stoker.tasks.embed.features import Prompts, make_datasets
from stoker.tasks.fewshot.classifier_head import Head
from stoker.tasks.fewshot.pairs import STRATEGIES, make_pairs, sample_examples
from stoker.tasks.fresh_models import FreshModels
from stoker.tasks.sentences import sentence_run
from stoker.tasks.sentences.losses import LOSSES
from stoker.tasks.sentences.report_examples import Classes, Examples
from stoker.tasks.sentences.st_models import load_sentence_transformer, set_row_length
from stoker.tasks.shown_rows import spread
from stoker.tasks.training_options import DataOptions

# No `from __future__ import annotations`: HfArgumentParser reads the types of these fields.

__all__ = ["FewshotOptions", "arguments_of", "begin", "main", "prepare"]

_LOSS = LOSSES["CosineSimilarityLoss"]
"""SetFit's default."""
_SHOWN = 200
"""Texts that are classified to choose the examples of the report."""


@dataclass
class FewshotOptions(DataOptions):
    """What is trained on."""

    text_column_names: str | None = field(
        default=None, metadata={"help": "The column with the text (default: guessed by its name)."}
    )
    label_column_name: str | None = field(default=None, metadata={"help": "The column with the class."})
    examples_per_class: int = field(
        default=8, metadata={"help": "Examples of each class to train on, drawn from the file with --seed."}
    )
    sampling_strategy: str = field(
        default="oversampling",
        metadata={
            "help": "Which pairs are made: all, as many of one class as of different ones (oversampling), as many as there are "
            "of the rarer kind (undersampling), or each once (unique).",
            "choices": STRATEGIES,
        },
    )
    num_iterations: int | None = field(
        default=None, metadata={"help": "Make 2 N pairs for each example instead; for many classes."}
    )
    max_seq_length: int | None = field(
        default=None, metadata={"help": "Maximum tokens of a text; longer ones are cut (default: the model's own)."}
    )
    samples: int = field(default=3, metadata={"help": "Examples of each kind in the report; 0 for none."})


def arguments_of(argv: Sequence[str]) -> Any:
    """The class of the training arguments."""
    from stoker.tasks.fewshot.fewshot_trainer import FewshotArguments

    return FewshotArguments


def begin(argv: list[str]) -> training_run.Job:
    job = training_run.begin("fewshot", argv, FewshotOptions, arguments_of(argv))
    if job.data.validation_file:
        job.args.do_eval = True
    return job


@dataclass(frozen=True)
class Prepared:
    """The examples of each set, and how the classifier is fitted and evaluated."""

    models: FreshModels
    raw: dict[str, Sequence[Example]]
    head_of: Any
    """The classifier for an embedding model."""
    fit: Any
    """None if nothing is trained."""
    evaluator: Any
    training: dict[str, Any]

    @property
    def metrics(self) -> Sequence[str]:
        from stoker.tasks.fewshot.head_fit import METRICS

        return sentence_run.main_first(METRICS, loss=False)

    def trainer(self, job: training_run.Job) -> Any:
        return _trainer(job, self.models.take(), self.fit, self.evaluator)


def prepare(job: training_run.Job) -> Prepared:
    from stoker.tasks.fewshot.head_fit import METRICS, HeadEvaluator, HeadFit

    args = job.args
    job.announce_reading()
    raw, classes = _read(job)
    job.announce(f"loading the weights of {job.model.model_name_or_path}")
    models = FreshModels.of(lambda: _load(job))
    loaded = None if "train" in raw else _loaded_head(job, models.first)
    labels = _labels(raw, classes, loaded)
    fit, training = None, {}
    if "train" in raw:
        chosen = _choose(job, raw["train"], labels)
        fit = HeadFit(_texts(chosen), [labels.number(one.label) for one in chosen], labels.names)
        training = {"data": f"{len(fit.texts)} examples of {len(labels.names)} classes", "loss": _LOSS.name}

    def head_of(body: Any) -> Head:
        head = loaded if fit is None else fit(body)
        assert head is not None
        return head

    evaluator: Any = None
    if validation := raw.get("validation"):
        numbers = [labels.number(one.label) for one in validation]
        evaluator = HeadEvaluator(head_of, _texts(validation), numbers, args.per_device_eval_batch_size)
        sentence_run.prepare_evaluation(job, METRICS, loss=False)
    return Prepared(models, raw, head_of, fit, evaluator, training)


def main(argv: list[str]) -> int:
    from stoker.tasks.fewshot.head_fit import METRICS, predict, predicted_classes

    job = begin(argv)
    args, options = job.args, job.data
    found = prepare(job)
    raw, head_of = found.raw, found.head_of
    validation = raw.get("validation")
    examples: Examples | None = None
    if validation and found.fit is not None and options.samples:
        shown = [validation[n] for n in spread(len(validation), _SHOWN)]
        examples = Classes(
            "Classes of texts", [one.texts for one in shown], [str(one.label) for one in shown],
            lambda body: predicted_classes(body, head_of(body), _texts(shown)),
        )  # fmt: skip
    trainer = found.trainer(job)
    train = partial(training_run.train, job, trainer, **found.training) if found.fit is not None else None
    metrics = sentence_run.train_and_evaluate(job, trainer, train, examples, METRICS, len(validation or ()))
    if args.do_predict and args.should_save:
        head = trainer.head or head_of(trainer.model)
        rows = predict(trainer.model, head, _texts(raw["test"]), args.per_device_eval_batch_size)
        names = (head.labels[int(row.argmax())] for row in rows)
        training_run.write_predictions(job, [one.id for one in raw["test"]], names)
    training_run.finish(job, trainer, metrics)
    return 0


def _load(job: training_run.Job) -> Any:
    from transformers import set_seed

    set_seed(job.args.seed)
    model = load_sentence_transformer(job.model)
    set_row_length(model, job.data.max_seq_length)
    return model


def _read(job: training_run.Job) -> tuple[dict[str, Sequence[Example]], tuple[str, ...]]:
    """The examples of each split, and the class names in order if a data set on the hub declares them."""
    raw: dict[str, Sequence[Example]] = {}
    classes: tuple[str, ...] = ()
    for split in training_run.wanted_splits(job.args):
        raw[split], names = split_examples(job, split)
        classes = classes or names
        if len(raw[split][0].texts) > 1:
            raise UserError(
                f"the {split} data has two columns of texts; name one of them with --text_column_names, or use "
                "`stoker train classify` for pairs of texts"
            )
    return raw, classes


def _loaded_head(job: training_run.Job, model: Any) -> Head:
    return Head.load(Path(job.model.model_name_or_path), int(model.get_embedding_dimension()))


def _labels(raw: dict[str, Sequence[Example]], classes: tuple[str, ...], loaded: Head | None) -> Labels:
    """The classes of the training data, or those of a model that is only evaluated."""
    if loaded is not None:
        labels = Labels(loaded.labels)
    else:
        found = {str(one.label) for one in raw["train"]}
        labels = Labels(tuple(name for name in Labels.of(raw["train"], classes).names if name in found))
    check_labels(labels, raw, for_numbers="`stoker train classify --do_regression`")
    return labels


def _texts(examples: Sequence[Example]) -> list[str]:
    return [one.texts[0] for one in examples]


def _choose(job: training_run.Job, examples: Sequence[Example], labels: Labels) -> list[Example]:
    wanted = job.data.examples_per_class
    chosen = sample_examples(examples, labels, wanted, job.args.seed)
    counts = Counter(str(one.label) for one in chosen)
    job.print(f"data: {len(chosen):,} of {len(examples):,} examples, {wanted} of each of {len(counts)} classes")
    if few := [f"{name} ({count})" for name, count in counts.items() if count < wanted]:
        more = f" and {len(few) - 5} more" if len(few) > 5 else ""
        job.print(f"classes with fewer examples: {', '.join(few[:5])}{more}")
    return chosen


def _trainer(job: training_run.Job, model: Any, fit: Any, evaluator: Any) -> Any:
    from sentence_transformers.sentence_transformer import losses
    from sentence_transformers.sentence_transformer.data_collator import SentenceTransformerDataCollator

    from stoker.tasks.fewshot.fewshot_trainer import FewshotTrainer

    args, options = job.args, job.data
    rows = {}
    if fit is not None:
        batch = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
        rows["train"] = make_pairs(
            fit.texts, fit.classes, strategy=options.sampling_strategy, iterations=options.num_iterations,
            most=args.max_steps * batch if args.max_steps > 0 else None,
        )  # fmt: skip
        job.print(f"{len(rows['train']):,} pairs of them; loss {_LOSS.name}")
    sets, table = make_datasets(rows, model, Prompts(), fresh=options.overwrite_cache)
    return training_run.make_trainer(
        job, FewshotTrainer, model, model.tokenizer, sets, fit=fit, evaluator=evaluator,
        loss=losses.CosineSimilarityLoss(model) if fit is not None else None,
        data_collator=SentenceTransformerDataCollator(preprocess_fn=table),
    )  # fmt: skip
