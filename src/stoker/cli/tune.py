"""`stoker tune TASK`: searches for the options of `stoker train TASK` with the best score on the validation data."""

from __future__ import annotations

import argparse
from typing import Any

from stoker import streams
from stoker.cli import parsing
from stoker.cli.task_names import announce_loading, require_task, require_task_installed, task_and_options
from stoker.command_options import options_of
from stoker.errors import UserError, one_line
from stoker.tasks import early_checks
from stoker.tasks.tune.tune_command import SearchCommand, SearchOptions

__all__ = ["main"]

_HELP = """usage: stoker tune TASK [RECIPE] --output_dir DIR [--trials N] [options of stoker train TASK]

Trains one run after the other with other options, stops those that are worse than the median, and writes the recipe of the
best. Every TASK of `stoker train`. Needs Optuna (pip install 'stoker[tune]') and data to evaluate on (--validation_file).

  --trials 20            how many runs to train or stop; the first has the options as given
  --search SPACE         what to try, in quotes (default: learning rate, batch size, epochs, and the rank of LoRA):
                         'learning_rate=1e-5..1e-3:log,lora_r=4|8|16,num_train_epochs=1..4'
  --hours H              start no run after this time (or --timeout SECONDS)
  --metric NAME          what is best: a metric of the evaluation (default: the task's main score)
  --direction D          minimize or maximize it (default: by the metric)
  --evaluations 4        how often a run is evaluated, at equal parts of its training; 1 stops none early
  --prune_after 5        runs that must have finished before one is stopped; 0 stops none
  --overwrite_output_dir start over; without it, the same command continues a search that was stopped or killed

DIR gets best_recipe.yaml, report.html, and a folder with the log of each run: `stoker runs DIR` compares them,
`stoker watch DIR/trial-001` shows one while it trains. `stoker train TASK --help` lists the other options.

examples:
  stoker tune classify --model_name_or_path bert-base-uncased --train_file train.tsv --validation_file dev.tsv --output_dir out
  stoker tune sft recipe.yaml --trials 10 --search 'learning_rate=1e-5..1e-3:log,lora_r=4|8|16' --output_dir out/tuned
  stoker train out/best_recipe.yaml              trains the best, in out/best"""

_MOST_TRIALS, _MOST_EVALUATIONS = 10_000, 100


def main(argv: list[str]) -> int:
    if not argv or "-h" in argv or "--help" in argv:
        print(_HELP)
        return 0
    task, rest = task_and_options("tune", argv)
    own, others = _parser().parse_known_args(rest)
    options = options_of(others)
    if options.pop("", None) is not None or not all(word.startswith("-") for word in others[:1]):
        raise UserError(f"stoker tune: unknown argument {others[0]}; `stoker tune --help` lists its options")
    require_task_installed("tune", task)
    parsing.require_installed("stoker tune", ["optuna"], "Optuna", extra="tune")
    seconds = own.timeout if own.hours is None else own.hours * 3600
    search = SearchOptions(
        own.trials, ",".join(own.search) if own.search else None, seconds, own.metric, own.direction, own.evaluations,
        own.prune_after,
    )  # fmt: skip
    command = SearchCommand.of(task, options, search)
    early_checks.check(task, command.trial_arguments({}, command.folder))
    command.check_space(lambda argv: early_checks.check_options(task, argv))
    announce_loading(others)
    streams.keep_running()
    require_task("tune", task)
    parsing.require_packages("stoker tune", ["optuna"], "Optuna", extra="tune")
    from stoker.tasks.loading import quiet

    quiet()
    from stoker.tasks.tune.tune_run import run_search

    try:
        return run_search(task, options, search)
    except ImportError as error:  # a package that some option needs, imported when training starts
        raise UserError(f"stoker tune {task}: {one_line(error)}") from None


def _parser() -> parsing.Parser:
    """The options of a search; all others are those of `stoker train`."""
    parser = parsing.Parser("tune", "search for the best options of a task")
    parser.add_argument("--trials", type=_trials, default=20)
    parser.add_argument("--search", nargs="+")
    limits = parser.add_mutually_exclusive_group()
    limits.add_argument("--hours", type=_hours)
    limits.add_argument("--timeout", type=parsing.seconds)
    parser.add_argument("--metric", type=parsing.path)
    parser.add_argument("--direction", choices=("minimize", "maximize"))
    parser.add_argument("--evaluations", type=_evaluations, default=4)
    parser.add_argument("--prune_after", type=_finished, default=5)
    return parser


def _trials(text: str) -> int:
    return parsing.whole(text, least=1, most=_MOST_TRIALS)


def _evaluations(text: str) -> int:
    return parsing.whole(text, least=1, most=_MOST_EVALUATIONS)


def _finished(text: str) -> int:
    return parsing.whole(text, most=_MOST_TRIALS)


def _hours(text: str) -> Any:
    value = parsing.amount(text)
    if not 0 < value <= 8784:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of hours above 0, at most a year")
    return value
