"""`stoker demo`: trains a small model on generated data in about four minutes, without a network."""

from __future__ import annotations

from pathlib import Path

from stoker import streams
from stoker.cli import parsing
from stoker.cli.parsing import require_transformers
from stoker.errors import UserError

__all__ = ["main"]


def main(argv: list[str]) -> int:
    parser = parsing.Parser(
        "demo", "train a small model to answer questions about an invented world, in about four minutes"
    )
    parser.add_argument(
        "--output_dir",
        type=parsing.path,
        default="stoker-demo",
        metavar="DIR",
        help="folder for model, data and report (stoker-demo)",
    )
    parser.add_argument("--seconds", type=parsing.seconds, default=170.0, metavar="S", help="time for training (170)")
    parser.add_argument(
        "--questions", type=parsing.count, metavar="N", help="number of training questions, instead of --seconds"
    )
    parser.add_argument("--seed", type=parsing.whole, default=7, metavar="N", help="seed of the generated data (7)")
    parser.add_argument("--model", type=parsing.path, metavar="DIR", help="model to train instead of MiniLM")
    parser.add_argument("--no-compare", action="store_true", help="skip the speed comparison with stock transformers")
    options = parser.parse_args(argv)
    if options.questions is not None and not 12 <= options.questions <= 3000:
        raise UserError(f"--questions is {options.questions}; it must be from 12 to 3000")
    require_transformers("stoker demo", extra="demo")
    streams.keep_running()
    from stoker.tasks.demo.demo_run import DemoOptions, run_demo

    return run_demo(
        DemoOptions(
            folder=Path(options.output_dir),
            seconds=options.seconds,
            seed=options.seed,
            model=options.model,
            questions=options.questions,
            compare=not options.no_compare,
        )
    )
