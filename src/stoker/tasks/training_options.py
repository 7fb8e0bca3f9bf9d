"""The options that all tasks of `stoker train` share, those of Hugging Face's example scripts, and the checks of their values.

Imports neither torch nor transformers: command lines are checked before those are loaded (`early_checks`).
"""

import difflib
import logging
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from stoker.errors import UserError, first_line
from stoker.option_values import StrictValues
from stoker.requires import supported

# No `from __future__ import annotations`: HfArgumentParser reads the types of these fields.

__all__ = [
    "CheckedParser", "DataOptions", "ModelOptions", "check_best", "check_label_names", "check_optimizer", "check_range", "given",
    "joined", "overlap_option", "padding_option",
]  # fmt: skip

log = logging.getLogger("stoker")


@dataclass
class ModelOptions:
    """Which model to fine-tune."""

    model_name_or_path: str = field(metadata={"help": "A folder, or the name of a model on the hub."})
    config_name: str | None = field(default=None, metadata={"help": "Configuration, if not the model's own."})
    tokenizer_name: str | None = field(default=None, metadata={"help": "Tokenizer, if not the model's own."})
    cache_dir: str | None = field(default=None, metadata={"help": "Where downloaded models are kept."})
    model_revision: str = field(default="main", metadata={"help": "Branch, tag or commit on the hub."})
    token: str | None = field(default=None, metadata={"help": "Access token for the hub."})
    use_auth_token: str | None = field(
        default=None,
        metadata={
            "help": "The former name of --token; without a value, use the stored token.",
            "nargs": "?",
            "const": "True",
        },
    )
    trust_remote_code: bool = field(
        default=False, metadata={"help": "Allow models on the hub to run their own Python code."}
    )
    use_fast_tokenizer: bool = field(
        default=True, metadata={"help": "Accepted for old commands; the fast tokenizer is always used."}
    )
    ignore_mismatched_sizes: bool = field(
        default=False, metadata={"help": "Replace a head of the wrong size instead of stopping."}
    )

    def __post_init__(self) -> None:
        if not self.use_fast_tokenizer:
            log.warning("--use_fast_tokenizer False is ignored: training needs the fast tokenizer")
        if self.use_auth_token is None:
            return
        if self.token is not None:
            raise UserError("--use_auth_token is the former name of --token; give only one of them")
        switch = {"true": True, "false": False}
        self.token = switch.get(self.use_auth_token.lower(), self.use_auth_token)  # type: ignore[assignment]


def overlap_option(default: int) -> Any:
    """--doc_stride of the tasks that divide long texts into windows."""
    return field(default=default, metadata={"help": "Tokens by which windows over a long text overlap."})


def padding_option(default: bool) -> Any:
    """--pad_to_max_length of the example scripts, each of which has its own default."""
    return field(default=default, metadata={"help": "Accepted for old commands; padding never enters the model."})


@dataclass
class DataOptions:
    """Which data to use, common to all tasks."""

    dataset_name: str | None = field(default=None, metadata={"help": "A data set on the hub."})
    dataset_config_name: str | None = field(default=None, metadata={"help": "Its configuration."})
    train_file: str | None = field(
        default=None, metadata={"help": "Training data: JSON, JSON lines, CSV, TSV, Parquet."}
    )
    validation_file: str | None = field(default=None, metadata={"help": "Data to evaluate on."})
    test_file: str | None = field(default=None, metadata={"help": "Data to predict."})
    overwrite_cache: bool = field(default=False, metadata={"help": "Tokenize again instead of using the cache."})
    preprocessing_num_workers: int | None = field(default=None, metadata={"help": "Threads that tokenize."})
    max_train_samples: int | None = field(default=None, metadata={"help": "Train on the first N examples only."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Evaluate on the first N examples only."})
    max_predict_samples: int | None = field(default=None, metadata={"help": "Predict the first N examples only."})
    strict: bool = field(default=False, metadata={"help": "Stop at the first row that cannot be used."})
    skip_memory_check: bool = field(
        default=False, metadata={"help": "Train even if the estimate exceeds the free memory."}
    )
    live: bool = field(
        default=False, metadata={"help": "Show the run in the browser while it trains (`stoker watch`)."}
    )
    live_port: int = field(default=0, metadata={"help": "The port for --live; 0: a free one."})
    live_host: str = field(
        default="127.0.0.1", metadata={"help": "The address for --live to listen on; 0.0.0.0: every interface."}
    )


class CheckedParser(StrictValues):
    """One sentence for every mistake in a command line of `stoker train`; `command` is the command without `stoker`."""

    command: str

    def error(self, message: str) -> NoReturn:
        raise UserError(f"stoker {self.command}: {message}; `stoker {self.command} --help` lists the common options")

    def refuse(self, rest: Sequence[str]) -> None:
        """Raises UserError if the parser has left anything over."""
        if rest and not rest[0].startswith("-"):
            self.error(f"{rest[0]!r} is one value too many for the option before it")
        if rest:
            close = difflib.get_close_matches(rest[0].partition("=")[0], self.option_names, n=1, cutoff=0.7)
            hint = f" (did you mean {close[0]}?)" if close else ""
            self.error(f"unknown option {rest[0]}{hint}")


_COMMA_SEPARATED = ("text_column_names", "column_names", "matryoshka_dims", "metric_name", "lora_targets")
"""Options with several values in one. A recipe may have them as a list, and a command line with spaces."""


def joined(argv: Sequence[str]) -> list[str]:
    """`--text_column_names a b` as `--text_column_names a,b`."""
    words: list[str] = []
    several = False  # whether the last word belongs to one of these options
    for word in argv:
        value_before = bool(words) and not (words[-1].startswith("-") and "=" not in words[-1])
        if word.startswith("-"):
            several = word.partition("=")[0].removeprefix("--").replace("-", "_") in _COMMA_SEPARATED
            words.append(word)
        elif several and value_before:
            words[-1] = f"{words[-1].removesuffix(',')},{word}"
        else:
            words.append(word)
    return words


_AT_LEAST_1 = (
    "n_best_size", "max_answer_length", "max_train_samples", "max_eval_samples", "max_predict_samples",
    "preprocessing_num_workers", "tokens_per_batch", "per_device_train_batch_size", "per_device_eval_batch_size",
    "gradient_accumulation_steps", "eval_accumulation_steps", "lora_r", "lora_alpha", "mine_negatives", "mini_batch_size",
    "examples_per_class", "num_iterations",
)  # fmt: skip
_AT_LEAST_0 = (
    "doc_stride", "dataloader_num_workers", "learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon",
    "num_train_epochs", "neftune_noise_alpha", "label_smoothing_factor", "seed", "lora_dropout", "samples", "beta",
    "mining_margin", "mining_skip", "live_port",
)  # fmt: skip
_BELOW = {
    "adam_beta1": 1,
    "adam_beta2": 1,
    "seed": 1 << 32,
    "neftune_noise_alpha": 1e6,
    "num_train_epochs": 1e6,
    "max_steps": 1e12,
    "tokens_per_batch": 1 << 27,
    "per_device_train_batch_size": 1 << 20,
    "per_device_eval_batch_size": 1 << 20,
    "gradient_accumulation_steps": 1 << 30,
    "dataloader_num_workers": 1025,
    "preprocessing_num_workers": 1025,
    "ddp_timeout": 1e9,
    "lora_r": 1 << 16,
    "lora_dropout": 1,
    "samples": 101,
    "mine_negatives": 101,
    "mining_margin": 1,
    "live_port": 65536,
}
"""Outside these ranges, options fail late with a library's own error, or silently do something else."""


def check_range(options: Any) -> None:
    """Raises UserError for a number out of its range, and for an empty name."""
    for name, least in (dict.fromkeys(_AT_LEAST_1, 1) | dict.fromkeys(_AT_LEAST_0, 0)).items():
        value = getattr(options, name, None)
        if value is not None and not value >= least:
            raise UserError(f"--{name} is {value}; it must be {least} or more")
    if (steps := getattr(options, "max_steps", None)) is not None and steps < 1 and steps != -1:
        raise UserError(f"--max_steps is {steps}; it must be 1 or more, or -1 to train for --num_train_epochs")
    for name, limit in _BELOW.items():
        value = getattr(options, name, None)
        if value is not None and not value < limit:
            raise UserError(f"--{name} is {value}; it must be below {limit:,.0f}")
    for name in _PATHS:
        value = getattr(options, name, None)
        if "" in (value if isinstance(value, list) else [value]):
            raise UserError(f"--{name} is empty; give a name, or leave the option out (is a shell variable not set?)")
    for name in _MAPPINGS:
        value = getattr(options, name, None)
        if value is not None and not isinstance(value, dict):
            raise UserError(f"--{name} {value}: write names and values as JSON, such as '{{\"name\": 1}}'")


_MAPPINGS = ("gradient_checkpointing_kwargs", "lr_scheduler_kwargs")
_PATHS = (
    "output_dir", "model_name_or_path", "config_name", "tokenizer_name", "cache_dir", "train_file", "validation_file",
    "test_file", "corpus_file", "logging_dir", "resume_from_checkpoint", "live_host",
)  # fmt: skip


def check_best(args: Any, argv: list[str], metrics: Collection[str], default: str) -> None:
    """Checks before training that the metric for choosing the best checkpoint exists.

    `metrics` are those that the task's evaluation returns; `default` is used where transformers would use the loss.
    """
    if not given("metric_for_best_model", argv):
        if args.metric_for_best_model is None and args.save_strategy != "best":
            return
        args.metric_for_best_model = default
        if not given("greater_is_better", argv):
            args.greater_is_better = not default.endswith("loss")
        if args.greater_is_better and args.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy"):
            # These schedules minimise by default.
            args.lr_scheduler_kwargs = {"mode": "max", **(args.lr_scheduler_kwargs or {})}
    name = args.metric_for_best_model.removeprefix("eval_")
    if args.do_train and args.eval_strategy != "no" and name not in metrics:
        close = difflib.get_close_matches(name, metrics, n=1, cutoff=0.6)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise UserError(f"--metric_for_best_model {name} is not measured{hint}; choose one of {', '.join(metrics)}")


def check_label_names(args: Any) -> None:
    """For tasks whose models expect `labels`, and whose data has a column for them."""
    if args.label_names not in (None, ["labels"]):
        raise UserError(
            f"--label_names {' '.join(args.label_names)}: the model of this task expects `labels`; leave the option out, and "
            "name the column of the file with --label_column_name"
        )


def check_optimizer(args: Any) -> None:
    """Tries the optimizer and the schedule on one weight, so that bad values are found before old checkpoints are deleted."""
    import torch
    import transformers

    if args.torch_compile_mode and supported("torch_compile_mode"):
        from torch._inductor import list_mode_options

        if args.torch_compile_mode not in (modes := list_mode_options()):
            raise UserError(
                f"--torch_compile_mode {args.torch_compile_mode} is unknown; choose one of {', '.join(modes)}"
            )
    if args.fsdp and args.world_size == 1:
        raise UserError("--fsdp needs more than one process; start it with `stoker launch -n 2`, or leave it out")
    probe = torch.nn.Linear(1, 1)
    name, schedule = (getattr(one, "value", one) for one in (args.optim, args.lr_scheduler_type))
    flags = f"--optim {name}" + (f" --optim_args {args.optim_args} (NAME=VALUE,...)" if args.optim_args else "")
    try:
        kind, options = transformers.Trainer.get_optimizer_cls_and_kwargs(args, probe)
        _require_finite(options)
        if {"params", "model", "optimizer_dict"} & options.keys():  # these depend on the real model
            return
        optimizer = kind(probe.parameters(), **options)
        flags = f"--lr_scheduler_type {schedule} --lr_scheduler_kwargs {args.lr_scheduler_kwargs}"
        _require_finite(args.lr_scheduler_kwargs)
        transformers.get_scheduler(
            args.lr_scheduler_type, optimizer, num_warmup_steps=1, num_training_steps=2,
            scheduler_specific_kwargs=args.lr_scheduler_kwargs,
        )  # fmt: skip
    except Exception as error:  # any error is caused by these values
        raise UserError(f"{flags} cannot be used: {type(error).__name__}: {first_line(error)}") from None


def _require_finite(value: Any) -> None:
    """Checks numbers inside JSON and NAME=VALUE options, which the parser does not see."""
    if isinstance(value, dict | list | tuple):
        for one in value.values() if isinstance(value, dict) else value:
            _require_finite(one)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} is not a finite number")


def given(name: str, argv: Sequence[str]) -> bool:
    """Whether an option is on the command line."""
    spellings = (f"--{name}", f"--{name.replace('_', '-')}")
    return any(word.partition("=")[0] in spellings for word in argv)
