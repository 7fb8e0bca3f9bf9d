"""`stoker train rerank`: trains a cross-encoder, which reads two texts together, on scores, classes, pairs or triplets.

sentence-transformers' trainer, losses and evaluators do the work, on rows that are checked and tokenized here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from stoker.errors import UserError
from stoker.tasks import training_run
from stoker.tasks.classify.data import label_order
from stoker.tasks.fresh_models import FreshModels
from stoker.tasks.loading import config_of, hub_options
from stoker.tasks.rerank.evaluators import RerankEvaluation, Sample, make_evaluation
from stoker.tasks.rerank.features import LOSS_OF_KIND, LOSSES, label_scale, make_datasets
from stoker.tasks.sentences import sentence_run
from stoker.tasks.sentences.losses import Loss, loss_settings
from stoker.tasks.sentences.report_examples import Classes, Examples, FirstTexts, PairScores
from stoker.tasks.sentences.st_models import (
    load_cross_encoder,
    load_sentence_transformer,
    set_row_length,
    transformer_of,
)
from stoker.tasks.sentences.text_options import TextOptions, read_corpus, read_split
from stoker.tasks.sentences.text_rows import CLASSED, LABELLED, PAIRS, TextRows
from stoker.tasks.shown_rows import spread

# No `from __future__ import annotations`: HfArgumentParser reads the types of these fields.

__all__ = ["RerankOptions", "arguments_of", "begin", "main", "prepare"]

_RANDOM_NEGATIVES = 4
"""sentence-transformers' default number of documents of other rows that MultipleNegativesRankingLoss adds."""
_QUERIES, _PAIRS = 16, 100
"""How much is scored for the examples of the report."""


@dataclass
class RerankOptions(TextOptions):
    """What is trained on."""

    mining_model: str | None = field(
        default=None,
        metadata={"help": "The embedding model that searches for --mine_negatives: a folder, or a name on the hub."},
    )


def arguments_of(argv: Sequence[str]) -> Any:
    """The class of the training arguments."""
    from stoker.tasks.sentences.st_trainers import RerankArguments

    return RerankArguments


def begin(argv: list[str]) -> training_run.Job:
    job = training_run.begin("rerank", argv, RerankOptions, arguments_of(argv))
    sentence_run.set_defaults(job)
    if job.data.mine_negatives and not job.data.mining_model:
        raise UserError("--mine_negatives needs an embedding model that searches; name one with --mining_model")
    return job


@dataclass(frozen=True)
class Prepared:
    """The rows of each set, their tokens, and how they are trained on and evaluated."""

    models: FreshModels
    rows: dict[str, TextRows]
    sets: dict[str, Any]
    table: Any
    """Tokenizes the pairs of a batch; None if nothing is trained."""
    classes: Sequence[str]
    loss: Loss | None
    """None if nothing is trained."""
    evaluation: RerankEvaluation | None
    training: dict[str, Any]

    @property
    def metrics(self) -> Sequence[str]:
        return sentence_run.main_first(self.evaluation.metrics if self.evaluation else ())

    def trainer(self, job: training_run.Job) -> Any:
        from sentence_transformers.cross_encoder import losses
        from sentence_transformers.cross_encoder.data_collator import CrossEncoderDataCollator

        from stoker.tasks.sentences.st_trainers import RerankTrainer

        model, made = self.models.take(), None
        if self.loss is not None:
            sentence_run.set_batches(job, self.loss)
            # MSELoss compares logits with the scores; through the sigmoid, predictions are what was trained.
            more = {"activation_fn": torch.nn.Sigmoid()} if self.loss.name == "MSELoss" else {}
            made = sentence_run.build_loss(job, losses, self.loss, model, **more)
            model.preprocess = self.table  # losses tokenize the pairs of a batch through it
        trainer = training_run.make_trainer(
            job, RerankTrainer, model, model.tokenizer, self.sets, loss=made,
            data_collator=CrossEncoderDataCollator(preprocess_fn=model.preprocess),
            evaluator=self.evaluation.evaluator if self.evaluation else None,
        )  # fmt: skip
        if self.classes:
            model.config.id2label = dict(enumerate(self.classes))
            model.config.label2id = {name: number for number, name in enumerate(self.classes)}
        return trainer


def prepare(job: training_run.Job) -> Prepared:
    options = job.data
    job.announce_reading()
    rows = _read(job)
    corpus = read_corpus(job)
    loss = sentence_run.choose_loss(job, rows["train"], LOSSES, LOSS_OF_KIND) if "train" in rows else None
    classes = _classes(job, rows)
    job.announce(f"loading the weights of {job.model.model_name_or_path}")
    models = FreshModels.of(lambda: _load(job, classes))
    evaluation = _evaluation(job, rows["validation"], corpus, classes) if "validation" in rows else None
    if loss is not None and options.mine_negatives:
        searcher = load_sentence_transformer(job.model, options.mining_model, "--mining_model")
        rows["train"] = sentence_run.add_negatives(job, rows["train"], searcher, corpus)
    if loss is None:
        return Prepared(models, rows, {}, None, classes, None, evaluation, {})
    sets, table = _datasets(job, models.first, rows, loss, classes)
    training = sentence_run.training_settings(job, rows["train"].kind, loss, LOSSES)
    return Prepared(models, rows, sets, table, classes, loss, evaluation, training)


def main(argv: list[str]) -> int:
    job = begin(argv)
    args = job.args
    found = prepare(job)
    rows, evaluation = found.rows, found.evaluation
    trainer = found.trainer(job)
    examples = _examples(rows.get("validation"), evaluation, found.classes) if job.data.samples else None
    train = partial(training_run.train, job, trainer, **found.training) if found.loss is not None else None
    names, count = (evaluation.metrics, len(rows["validation"])) if evaluation is not None else ((), 0)
    metrics = sentence_run.train_and_evaluate(job, trainer, train, examples, names, count)
    if args.do_predict and args.should_save:
        _predict(job, trainer.model, rows["test"], found.classes)
    training_run.finish(job, trainer, metrics)
    return 0


def _load(job: training_run.Job, classes: Sequence[str]) -> Any:
    from transformers import set_seed

    set_seed(job.args.seed)
    model = load_cross_encoder(job.model, max(len(classes), 1))
    set_row_length(model, job.data.max_seq_length)
    return model


def _read(job: training_run.Job) -> dict[str, TextRows]:
    """The rows of each split. Labels are classes if they are words, or if the loss is that of classes."""
    asked = (job.data.loss or "").lower().removesuffix("loss")
    classes = True if asked == "crossentropy" else None
    rows = {split: read_split(job, split, classes=classes) for split in training_run.wanted_splits(job.args)}
    for split, one in rows.items():
        if one.kind == LABELLED:
            raise UserError(
                f"the {split} data has {one.kind} ({', '.join(one.columns.names)}), and a reranker reads two texts; name both "
                "with --text_column_names, or use `stoker train classify`"
            )
    return rows


def _classes(job: training_run.Job, rows: dict[str, TextRows]) -> tuple[str, ...]:
    """The classes in the order of the model, if it has been trained on them, else sorted; empty if there are none."""
    labels = [label for one in rows.values() if one.kind == CLASSED for label in one.labels]
    names = tuple(sorted({*labels}, key=label_order))
    # Predictions need no labels; of the classes of a trained model, the data may have only some.
    if all(one.kind == CLASSED or (split, one.kind) == ("test", PAIRS) for split, one in rows.items()):
        known = _known_classes(job)
        if {*names} == {*known} or ("train" not in rows and {*names} < {*known}):
            return known
    if len(names) == 1:
        raise UserError(f"the pairs have one class ({names[0]}); training needs two or more")
    mixed = {one.kind for split, one in rows.items() if split != "test"}
    if CLASSED in mixed and len(mixed) > 1:
        raise UserError(f"the training data and the validation data differ in kind: {' and '.join(sorted(mixed))}")
    return names


def _known_classes(job: training_run.Job) -> tuple[str, ...]:
    """The classes that --model_name_or_path predicts; empty if it has a single output, or no head."""
    config = config_of(
        str(transformer_of(Path(job.model.model_name_or_path))), flag="--model_name_or_path", **hub_options(job.model)
    )
    head = next(iter(config.architectures or ()), "")
    if not head.endswith("ForSequenceClassification") or config.num_labels < 2:
        return ()
    return tuple(config.id2label[number] for number in range(config.num_labels))


def _evaluation(
    job: training_run.Job, rows: TextRows, corpus: Sequence[str], classes: Sequence[str]
) -> RerankEvaluation:
    evaluation = make_evaluation(rows, corpus, classes, batch_size=max(32, job.args.per_device_eval_batch_size))
    sentence_run.prepare_evaluation(job, evaluation.metrics)
    return evaluation


def _datasets(
    job: training_run.Job, model: Any, rows: dict[str, TextRows], loss: Loss, classes: Sequence[str]
) -> tuple[dict[str, Any], Any]:
    used = {split: one for split, one in rows.items() if one.kind in loss.kinds and split != "test"}
    scale = label_scale(loss, rows["train"])
    if scale > 1:
        job.print(f"scores are divided by {scale:g}, because {loss.name} needs shares of 1")
    settings = loss_settings(job.data.loss_kwargs)
    drawn = int(settings.get("num_negatives") or _RANDOM_NEGATIVES) if loss.in_batch else 0
    return make_datasets(
        used, model, loss, classes, scale=scale, random_negatives=drawn, fresh=job.data.overwrite_cache
    )


def _examples(rows: TextRows | None, evaluation: RerankEvaluation | None, classes: Sequence[str]) -> Examples | None:
    """What the model puts first, how it scores pairs, or which classes it predicts, in the validation data."""
    if rows is None or evaluation is None:
        return None
    if evaluation.samples:
        chosen = [evaluation.samples[n] for n in spread(len(evaluation.samples), _QUERIES)]
        return _first_documents(chosen)
    numbers = spread(len(rows), _PAIRS)
    pairs, expected = [rows.texts[n] for n in numbers], [rows.labels[n] for n in numbers]
    if rows.kind == CLASSED:
        return Classes("Classes of pairs", pairs, expected, lambda model: _predicted_classes(model, pairs, classes))
    return PairScores("Scores of pairs", pairs, np.array(expected), "score", _scores)


def _first_documents(samples: Sequence[Sample]) -> Examples:
    candidates = list(dict.fromkeys(text for one in samples for text in [*one.positive, *one.negative]))
    place = {text: n for n, text in enumerate(candidates)}
    allowed = [[place[text] for text in dict.fromkeys([*one.positive, *one.negative])] for one in samples]
    pairs = [(one.query, candidates[n]) for one, own in zip(samples, allowed, strict=True) for n in own]
    ends = np.cumsum([len(own) for own in allowed])[:-1]
    return FirstTexts(
        "The document that comes first", [one.query for one in samples], candidates, allowed,
        right=[{place[text] for text in one.positive} for one in samples],
        expected=[one.positive[0] for one in samples],
        scores=lambda model: np.split(_scores(model, pairs), ends),
    )  # fmt: skip


def _scores(model: Any, pairs: Sequence[tuple[str, ...]], **how: Any) -> NDArray[Any]:
    found: NDArray[Any] = model.predict(
        [list(pair) for pair in pairs], show_progress_bar=False, convert_to_numpy=True, **how
    )
    return found


def _predicted_classes(model: Any, pairs: Sequence[tuple[str, ...]], classes: Sequence[str]) -> list[tuple[str, float]]:
    return [(classes[int(row.argmax())], float(row.max())) for row in _scores(model, pairs, apply_softmax=True)]


def _predict(job: training_run.Job, model: Any, rows: TextRows, classes: Sequence[str]) -> None:
    """Scores the pairs of the test file; of triplets, the second text."""
    found = _scores(model, [row[:2] for row in rows.texts])
    predictions = (classes[int(score.argmax())] if classes else f"{float(score):.4f}" for score in found)
    training_run.write_predictions(job, [str(number) for number in range(len(rows))], predictions)
