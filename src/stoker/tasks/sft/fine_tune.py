"""`stoker train sft`: fine-tunes a language model on chats, instructions or texts, or on preference pairs (`--dpo`).

TRL's trainers and PEFT do the work, on rows that are checked, tokenized and labelled here.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from stoker.command_options import options_of
from stoker.english import counted
from stoker.errors import UserError, one_line
from stoker.kernels.frozen_parameter import FORMS
from stoker.model.frozen_weights import describe
from stoker.model.optimize import restore_classes
from stoker.tasks import hub, training_run
from stoker.tasks.early_checks import wants_pairs
from stoker.tasks.faults import Faults
from stoker.tasks.fresh_models import FreshModels
from stoker.tasks.loading import most_tokens
from stoker.tasks.sft.chat_template import adopt_template, ensure_template
from stoker.tasks.sft.data import Chat, Example, Format, Pair, Plain, collect, read_examples
from stoker.tasks.sft.features import IGNORED, Encoder, make_pairs, make_rows
from stoker.tasks.sft.language_model import LanguageModel, load_for_training, lora_config, save_merged
from stoker.tasks.sft.option_rules import check_rules
from stoker.tasks.sft.samples import Samples, choose_samples
from stoker.tasks.sft.training_time import estimate_seconds, rounded_duration
from stoker.tasks.training_options import DataOptions, check_best, given

# No `from __future__ import annotations`: HfArgumentParser reads the types of these fields.

__all__ = ["SftOptions", "arguments_of", "begin", "load", "main", "prepare", "run"]

_RATES = {(False, False): 2e-4, (True, False): 2e-5, (False, True): 1e-5, (True, True): 1e-6}
"""Default learning rates for (--full, --dpo): TRL's for full training, ten times as much for LoRA, as TRL advises."""


@dataclass
class SftOptions(DataOptions):
    """Data, what is trained on, and adapters."""

    loss_on: str | None = field(
        default=None,
        metadata={
            "help": "Which tokens are trained on: completions (the last answer), assistant (every answer), or all. Default: "
            "assistant for chats, completions for prompts and instructions, all for texts.",
            "choices": ["completions", "assistant", "all"],
        },
    )
    full: bool = field(default=False, metadata={"help": "Train all weights instead of a LoRA adapter."})
    lora_r: int = field(default=16, metadata={"help": "Rank of the LoRA adapter."})
    lora_alpha: int | None = field(
        default=None, metadata={"help": "Its scale, divided by the rank (default: twice the rank)."}
    )
    lora_dropout: float = field(default=0.0, metadata={"help": "Dropout before the adapter."})
    lora_targets: str = field(
        default="auto",
        metadata={
            "help": "Layers with an adapter: auto or all-linear (all but the head), or names separated by commas."
        },
    )
    frozen_weights: str | None = field(
        default=None,
        metadata={
            "help": "Store the weights of the base model, which an adapter leaves as they are, in fewer bits: bfloat16, int8 "
            "or nf4 (QLoRA). Embeddings and head are stored in bfloat16. Default: fp32.",
            "choices": list(FORMS),
        },
    )
    merge: bool = field(
        default=False, metadata={"help": "Also write the model with the adapter merged, to OUTPUT_DIR/merged."}
    )
    dpo: bool = field(default=False, metadata={"help": "Train on preference pairs: columns prompt, chosen, rejected."})
    samples: int = field(default=3, metadata={"help": "Answers in the report, before and after training; 0 for none."})


def arguments_of(argv: Sequence[str]) -> Any:
    """The class of TRL's arguments that a command line needs."""
    from stoker.tasks.sft.trl_trainers import DPOArguments, SFTArguments

    return DPOArguments if wants_pairs(argv) else SFTArguments


def main(argv: list[str]) -> int:
    job = begin(argv)
    raw = _read_all(job)
    job.announce(f"loading the weights of {job.model.model_name_or_path}")
    return run(job, load(job), raw=raw)


def begin(argv: list[str]) -> training_run.Job:
    argv = _with_output(argv)
    job = training_run.begin("sft", argv, SftOptions, arguments_of(argv))
    _check(job)
    return job


def _with_output(argv: list[str]) -> list[str]:
    """A command line with --output_dir: without one, out/chat for chat.jsonl."""
    options = options_of(argv)
    data = options.get("train_file", options.get("dataset_name"))
    if "output_dir" in options or not isinstance(data, str):
        return argv
    name = Path(data).name.partition(".")[0]
    return [*argv, "--output_dir", str(Path("out") / name)] if name else argv


def load(job: training_run.Job) -> LanguageModel:
    from transformers import set_seed

    set_seed(job.args.seed)
    return load_for_training(job.model, job.data.frozen_weights)


Raw: TypeAlias = dict[str, tuple[Format, list[Example], Faults]]
"""The examples of each split, as they were read."""


@dataclass(frozen=True)
class Prepared:
    """The rows of each set, and what was read for them."""

    models: FreshModels
    tokenizer: Any
    raw: Raw
    sets: dict[str, Any]
    max_length: int
    metrics: Sequence[str]

    @property
    def training(self) -> dict[str, Any]:
        return {"format": self.raw["train"][0].name}

    def trainer(self, job: training_run.Job) -> Any:
        job.args.max_length = self.max_length
        return _trainer(job, LanguageModel(self.tokenizer, self.models.take()), self.sets)


def prepare(job: training_run.Job, found: LanguageModel | None = None, raw: Raw | None = None) -> Prepared:
    """`found` is the model, if it has been loaded already, and `raw` the data, if it has been read."""
    args = job.args
    raw = _read_all(job) if raw is None else raw
    if found is None:
        job.announce(f"loading the weights of {job.model.model_name_or_path}")
        found = load(job)
    args.max_length = _row_length(args.max_length, found)
    chats = _prepare_template(job, raw, found.tokenizer)
    encoder = _encoder(job, raw["train"][0], found.tokenizer, chats)
    sets = {split: _dataset(job, encoder, *one) for split, one in raw.items()}
    models = FreshModels(found.model, lambda: load(job).model)
    return Prepared(models, found.tokenizer, raw, sets, args.max_length, _metrics(job.data))


def run(
    job: training_run.Job, found: LanguageModel, exam: Samples | None = None, raw: Raw | None = None, **facts: Any
) -> int:
    """Trains and writes the result. `exam` replaces the samples of --samples; `facts` are added to the run's log."""
    args, options = job.args, job.data
    prepared = prepare(job, found, raw)
    raw = prepared.raw
    if exam is None:
        exam = Samples(choose_samples(raw.get("validation", raw["train"])[1], found.tokenizer, options.samples))
    trainer = prepared.trainer(job)
    before = _ask(job, trainer, exam)
    _say_how_long(job, trainer)
    training_run.train(job, trainer, **{**prepared.training, **facts})
    metrics = _evaluate(job, trainer, prepared.sets) if args.do_eval else {}
    if exam.samples and args.should_save:
        restore_classes(trainer.model)  # generation runs as stock does, and would say so
        after = _ask(job, trainer, exam)
        _log_answers(trainer, exam, before, after)
        metrics = {**metrics, **after}
    if options.merge and args.should_save:
        save_merged(trainer.model, found.tokenizer, Path(args.output_dir) / "merged")
        job.print(f"merged model in {Path(args.output_dir) / 'merged'}")
    training_run.finish(job, trainer, metrics)
    return 0


def _metrics(options: SftOptions) -> list[str]:
    return ["loss", *([] if options.dpo else ["mean_token_accuracy"])]


def _check(job: training_run.Job) -> None:
    args, options = job.args, job.data
    check_rules(args, options)
    if options.validation_file:
        args.do_eval = True
    if not given("learning_rate", job.argv):
        args.learning_rate = _RATES[options.full, options.dpo]
    check_best(args, job.argv, _metrics(options), "loss")


def _row_length(asked: int | None, found: LanguageModel) -> int:
    """--max_length, reduced to what the model takes."""
    most = most_tokens(asked or 1 << 30, found.tokenizer, found.model.config)
    return max(min(asked or most, most), 8)


def _read_all(job: training_run.Job) -> Raw:
    job.announce_reading()
    return {split: _read(job, split) for split in training_run.wanted_splits(job.args)}


def _read(job: training_run.Job, split: str) -> tuple[Format, list[Example], Faults]:
    options = job.data
    file, most = job.source(split)
    if file:
        return read_examples(file, pairs=options.dpo, strict=options.strict, most=most)
    found = hub.load_split(options.dataset_name, options.dataset_config_name, split, job.model)
    faults = Faults(found.name, options.strict)
    return *collect(found.rows(), faults, pairs=options.dpo, most=most), faults


def _prepare_template(job: training_run.Job, raw: dict[str, Any], tokenizer: Any) -> bool:
    """Decides whether rows are written by the chat template; plain prompts are too if the model comes with a template."""
    name = job.model.model_name_or_path
    if path := getattr(job.args, "chat_template_path", None):
        adopt_template(tokenizer, path)
    own = bool(tokenizer.chat_template)
    for _, examples, _ in raw.values():
        if own:
            examples[:] = [dataclasses.replace(one, content=_as_chat(one.content)) for one in examples]
    chats = any(isinstance(_first(one.content), Chat) for _, examples, _ in raw.values() for one in examples[:1])
    if chats:
        ensure_template(tokenizer, name)
    if tokenizer.eos_token is None and not chats:
        raise UserError(
            f"the tokenizer of {name} has no end-of-text token (eos_token), so the model could not learn to stop"
        )
    return chats


def _first(content: Chat | Plain | Pair) -> Chat | Plain:
    return content.chosen if isinstance(content, Pair) else content


def _as_chat(content: Any) -> Any:
    if isinstance(content, Pair):
        return Pair(_as_chat(content.chosen), _as_chat(content.rejected))
    if isinstance(content, Chat) or not content.prompt:
        return content
    return Chat(
        [{"role": "user", "content": content.prompt}, {"role": "assistant", "content": content.completion.strip()}]
    )


def _encoder(job: training_run.Job, form: Format, tokenizer: Any, chats: bool) -> Encoder:
    loss_on = job.data.loss_on or form.loss_on
    if form.name == "plain text" and loss_on != "all":
        raise UserError(
            f"--loss_on {loss_on} needs prompts or chats, and the training data is plain text; use --loss_on all"
        )
    how = "with the model's chat template" if chats else "without a chat template"
    job.print(f"data: {form.name} ({', '.join(form.columns)}), {how}; loss on {_LOSS_ON[loss_on]}")
    return Encoder.of(tokenizer, loss_on, chats=chats)


_LOSS_ON = {"completions": "completions", "assistant": "the assistant's turns", "all": "all tokens"}


def _dataset(job: training_run.Job, encoder: Encoder, form: Format, examples: list[Example], faults: Faults) -> Any:
    """The rows as TRL takes them: tokens and labels, or the two chats or texts of each pair."""
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()
    if examples:
        job.announce(f"tokenizing {len(examples):,} rows")
    if job.data.dpo:
        pairs = make_pairs(examples, encoder, job.args.max_length, faults)
        columns = [{**_columns(pair), "length": length} for pair, length in pairs]
        rows: Sequence[Any] = pairs
        made = (lambda: Dataset.from_list(columns)) if pairs else None
    else:
        rows = tokens = make_rows(examples, encoder, job.args.max_length, faults)
        made = lambda: Dataset.from_dict(  # noqa: E731
            {"input_ids": [one.ids for one in tokens], "labels": [one.labels for one in tokens],
             "length": [len(one.ids) for one in tokens]}
        )  # fmt: skip
    faults.settle(len(rows))
    if not rows or made is None:
        raise UserError(
            f"{faults.source} contains no rows that can be trained on with --max_length {job.args.max_length}"
        )
    return made()


def _columns(pair: Pair) -> dict[str, Any]:
    if isinstance(pair.chosen, Chat) and isinstance(pair.rejected, Chat):
        prompt, chosen = pair.chosen.messages[:-1], pair.chosen.messages[-1:]
        return {"prompt": prompt, "chosen": chosen, "rejected": pair.rejected.messages[len(prompt) :]}
    assert isinstance(pair.chosen, Plain)
    assert isinstance(pair.rejected, Plain)
    return {"prompt": pair.chosen.prompt, "chosen": pair.chosen.completion, "rejected": pair.rejected.completion}


def _trainer(job: training_run.Job, found: LanguageModel, sets: dict[str, Any]) -> Any:
    from stoker.tasks.sft.trl_trainers import DPOTrainer, SFTTrainer

    args, options = job.args, job.data
    settings: dict[str, Any] = {"data_collator": None, "peft_config": None if options.full else lora_config(options)}
    if not options.dpo and not args.packing:
        args.dataset_kwargs = {**(args.dataset_kwargs or {}), "skip_prepare_dataset": True}  # tokenized and cut already
    if options.dpo and options.full:
        import copy

        settings["ref_model"] = copy.deepcopy(found.model)
    kind = DPOTrainer if options.dpo else SFTTrainer
    try:
        with _hidden_from_trl(args):
            trainer = training_run.make_trainer(job, kind, found.model, found.tokenizer, sets, **settings)
    except (TypeError, RuntimeError) as error:
        raise UserError(f"stoker train sft: {one_line(error)}") from None
    trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    total = sum(p.numel() for p in trainer.model.parameters())
    job.print(f"training {trained:,} of {total:,} parameters" + ("" if options.full else " (LoRA; --full trains all)"))
    if stored := describe(trainer.model):
        job.print(f"frozen weights: {stored}")
    return trainer


@contextmanager
def _hidden_from_trl(args: Any) -> Iterator[None]:
    """Hides arguments that have been applied to the rows already: TRL would apply them again, or refuse them."""
    names = ["chat_template_path"] if getattr(args, "chat_template_path", None) else []
    if getattr(args, "padding_free", False) and not args.packing:
        names.append("max_length")
    kept = {name: getattr(args, name) for name in names}
    try:
        for name in names:
            setattr(args, name, None)
        yield
    finally:
        for name, value in kept.items():
            setattr(args, name, value)


def _ask(job: training_run.Job, trainer: Any, exam: Samples) -> dict[str, float]:
    if not exam.samples or not job.args.should_save:
        return {}
    job.print(f"generating {counted(len(exam.samples), 'sample answer')} {exam.purpose}")
    return exam.ask(trainer.model, trainer.processing_class)


def _log_answers(trainer: Any, exam: Samples, before: dict[str, float], after: dict[str, float]) -> None:
    for step, scores in ((0, before), (trainer.state.global_step, after)):
        if scores:
            trainer.recorder.write("evaluation", step=step, **scores)
    trainer.recorder.write("examples", rows=exam.rows())


def _say_how_long(job: training_run.Job, trainer: Any) -> None:
    from stoker.hf.batches import lengths_of
    from stoker.hf.step_cost import Speed, StepCost
    from stoker.machine import rates, this_machine

    known = rates.known(this_machine())
    if known is None:
        return
    args, rows = job.args, trainer.train_dataset
    labelled, cost = 1.0, StepCost.of(trainer.model)
    if job.data.dpo:  # TRL also computes what the model said before training
        cost = cost.with_forward()
    else:
        labels = rows[: min(len(rows), 1000)]["labels"]
        labelled = float(np.mean(np.concatenate([np.asarray(one) for one in labels]) != IGNORED))
    lengths = lengths_of(rows, args.length_column_name)
    seconds = estimate_seconds(cost, Speed.of(known, bf16=args.bf16), lengths, labelled, args)
    job.print(f"estimated time of training on this machine: {rounded_duration(seconds)}")


def _evaluate(job: training_run.Job, trainer: Any, sets: dict[str, Any]) -> dict[str, Any]:
    metrics: dict[str, Any] = trainer.evaluate()
    rows = len(sets["validation"])
    if not job.data.dpo:
        metrics["eval_perplexity"] = math.exp(min(metrics["eval_loss"], 700.0))
    trainer.save_metrics("eval", {**metrics, "eval_samples": rows})
    parts = [f"loss {metrics['eval_loss']:.3f}"]
    if "eval_perplexity" in metrics:
        parts.append(f"perplexity {metrics['eval_perplexity']:.2f}")
    name, what = ("rewards/accuracies", "pairs") if job.data.dpo else ("mean_token_accuracy", "tokens")
    if (right := metrics.get(f"eval_{name}")) is not None:
        parts.append(f"{right:.1%} of the {what} right")
    job.print(f"evaluation: {', '.join(parts)} on {rows:,} rows")
    return metrics
