"""`stoker train qa`: fine-tunes a model to answer questions from texts, evaluates it by EM and F1, predicts."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stoker.tasks import hub, training_run
from stoker.tasks.faults import Faults
from stoker.tasks.loading import load_config_and_tokenizer, load_model, row_length
from stoker.tasks.qa.answers import Answer, choose_answers
from stoker.tasks.qa.data import Question, collect, read_questions
from stoker.tasks.qa.features import Windows, make_windows
from stoker.tasks.qa.metrics import exact_match, squad, squad_v2
from stoker.tasks.row_predictions import predict_rows
from stoker.tasks.scoring_trainer import ScoringTrainer
from stoker.tasks.shown_rows import right_and_wrong
from stoker.tasks.training_options import DataOptions, check_best, overlap_option, padding_option

# No `from __future__ import annotations`: HfArgumentParser reads the types of these fields.

__all__ = ["QaOptions", "QaTrainer", "begin", "main", "prepare"]

log = logging.getLogger("stoker")

# What --metric_for_best_model may name. As in run_qa.py, evaluation computes answers and no loss.
_METRICS = ("exact_match", "f1")
_V2_METRICS = ("exact", "f1", "HasAns_exact", "HasAns_f1", "NoAns_exact", "NoAns_f1", "best_exact", "best_f1")


@dataclass
class QaOptions(DataOptions):
    """Data, and how answers are chosen."""

    max_seq_length: int = field(default=384, metadata={"help": "Maximum tokens of question and text together."})
    pad_to_max_length: bool = padding_option(default=True)
    version_2_with_negative: bool = field(
        default=False, metadata={"help": "Some questions have no answer (SQuAD 2.0)."}
    )
    null_score_diff_threshold: float = field(
        default=0.0, metadata={"help": "How much better 'no answer' must score to be chosen."}
    )
    doc_stride: int = overlap_option(128)
    n_best_size: int = field(default=20, metadata={"help": "Candidates considered per window and kept per question."})
    max_answer_length: int = field(default=30, metadata={"help": "Maximum tokens of an answer."})


class QaTrainer(ScoringTrainer):
    """Evaluates by choosing one answer per question from the logits of all windows; reports EM and F1."""

    def __init__(self, *rest: Any, options: QaOptions, **named: Any) -> None:
        super().__init__(*rest, **named)
        self.options = options
        self.last_answers: list[Answer] = []

    def answers(self, windows: Windows, description: str) -> list[Answer]:
        """One answer for every question of `windows`."""
        rows = [(start, end) for start, end in predict_rows(self, windows, description, outputs=2)[0]]
        options = self.options
        return choose_answers(
            windows,
            rows,
            n_best_size=options.n_best_size,
            max_answer_length=options.max_answer_length,
            no_answer=options.version_2_with_negative,
            null_score_diff_threshold=options.null_score_diff_threshold,
        )

    def score(self, rows: Windows, prefix: str) -> tuple[dict[str, float], int]:
        self.last_answers = self.answers(rows, "Evaluation")
        if self.args.should_save:
            shown = examples(self.last_answers, rows.questions)
            self.recorder.write("examples", step=self.state.global_step, rows=shown)
        return score(self.last_answers, rows.questions, self.options), len(rows.questions)


def score(answers: Sequence[Answer], questions: Sequence[Question], options: QaOptions) -> dict[str, float]:
    predictions = {answer.id: answer.text for answer in answers}
    if not options.version_2_with_negative:
        return squad(predictions, questions)
    # As run_qa.py does: predictions are final, and the scores of "no answer" are not passed on.
    return squad_v2(predictions, questions)


def examples(answers: Sequence[Answer], questions: Sequence[Question], most: int = 6) -> list[dict[str, Any]]:
    """Some right and some wrong answers for the report."""
    rows: list[dict[str, Any]] = []
    for answer, question in zip(answers, questions, strict=True):
        good = max((exact_match(answer.text, text) for text in question.answers), default=float(not answer.text))
        chosen = answer.chosen
        rows.append(
            {
                "id": question.id,
                "question": question.question,
                "context": question.context[:1500],
                "answer": answer.text,
                "begin": chosen.begin,
                "end": chosen.end,
                "expected": list(dict.fromkeys(question.answers))[:3],
                "right": bool(good),
                "probability": round(answer.probability, 4),
            }
        )
    return right_and_wrong(rows, most)


def save_answers(folder: Path, prefix: str, answers: Sequence[Answer], options: QaOptions) -> None:
    """Writes predictions and n-best candidates under run_qa.py's file names."""
    training_run.write_json(folder / f"{prefix}_predictions.json", {answer.id: answer.text for answer in answers})
    best = {
        answer.id: [
            {"text": c.text, "probability": c.probability, "start_logit": c.start_logit, "end_logit": c.end_logit}
            for c in answer.candidates
        ]
        for answer in answers
    }
    training_run.write_json(folder / f"{prefix}_nbest_predictions.json", best)
    if options.version_2_with_negative:
        training_run.write_json(
            folder / f"{prefix}_null_odds.json", {answer.id: answer.no_answer_lead for answer in answers}
        )


def begin(argv: list[str]) -> training_run.Job:
    job = training_run.begin("qa", argv, QaOptions)
    check_best(job.args, job.argv, _metrics(job.data), "f1")
    return job


def _metrics(options: QaOptions) -> tuple[str, ...]:
    return _V2_METRICS if options.version_2_with_negative else _METRICS


@dataclass(frozen=True)
class Prepared:
    """The windows of each set, and what a model for them needs."""

    sets: dict[str, Windows]
    options: QaOptions
    tokenizer: Any
    config: Any

    @property
    def metrics(self) -> Sequence[str]:
        return sorted(_metrics(self.options), key=lambda name: name != "f1")

    @property
    def training(self) -> dict[str, Any]:
        return {}

    def trainer(self, job: training_run.Job) -> QaTrainer:
        from transformers import AutoModelForQuestionAnswering, set_seed

        set_seed(job.args.seed)
        job.announce(f"loading the weights of {job.model.model_name_or_path}")
        model = load_model(AutoModelForQuestionAnswering, job.model, self.config)
        options = self.options
        trainer: QaTrainer = training_run.make_trainer(
            job, QaTrainer, model, self.tokenizer, self.sets, options=options
        )
        trainer.padded_length = options.max_seq_length if options.pad_to_max_length else None
        return trainer


def prepare(job: training_run.Job) -> Prepared:
    options = job.data
    config, tokenizer = load_config_and_tokenizer(job.model)
    options.max_seq_length = row_length(options.max_seq_length, tokenizer, config)
    job.announce_reading()
    sets = {split: _windows(job, tokenizer, split) for split in training_run.wanted_splits(job.args)}
    return Prepared(sets, options, tokenizer, config)


def main(argv: list[str]) -> int:
    job = begin(argv)
    args, options = job.args, job.data
    found = prepare(job)
    sets = found.sets
    trainer = found.trainer(job)
    metrics: dict[str, Any] = {}
    if args.do_train:
        training_run.train(job, trainer, **found.training)
    if args.do_eval:
        metrics = training_run.evaluate(trainer, len(sets["validation"].questions))
        if args.should_save:
            save_answers(Path(args.output_dir), "eval", trainer.last_answers, options)
        job.print(_summary(metrics, len(sets["validation"].questions)))
    if args.do_predict:
        answers = trainer.answers(sets["test"], "Prediction")
        if args.should_save:
            save_answers(Path(args.output_dir), "predict", answers, options)
        job.print(f"{len(answers):,} answers in {Path(args.output_dir) / 'predict_predictions.json'}")
    training_run.finish(job, trainer, metrics)
    return 0


def _windows(job: training_run.Job, tokenizer: Any, split: str) -> Windows:
    options = job.data
    training = split == "train"
    file, most = job.source(split)
    if file:
        questions: Sequence[Question] = read_questions(
            file, training=training, strict=options.strict, labelled=split != "test"
        )
    else:
        faults = Faults(f"{options.dataset_name}[{split}]", options.strict)
        found = hub.load_split(options.dataset_name, options.dataset_config_name, split, job.model)
        questions = collect(found.rows(), faults, training=training, labelled=split != "test")
        faults.settle(len(questions))
    questions = training_run.cut(questions, most)
    if split != "test" and not options.version_2_with_negative:
        without = sum(not question.answers for question in questions)
        if without:
            log.warning(
                "%s of %s %s questions have no answer; --version_2_with_negative lets the model say so",
                f"{without:,}", f"{len(questions):,}", split,
            )  # fmt: skip
    job.announce(f"tokenizing {len(questions):,} questions")
    return make_windows(
        questions,
        tokenizer,
        max_seq_length=options.max_seq_length,
        doc_stride=options.doc_stride,
        training=training,
        fresh=options.overwrite_cache,
    )


def _summary(metrics: dict[str, Any], questions: int) -> str:
    exact = metrics.get("eval_exact_match", metrics.get("eval_exact", 0.0))
    return f"EM {exact:.1f}, F1 {metrics['eval_f1']:.1f} on {questions:,} questions"
