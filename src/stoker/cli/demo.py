"""`stoker demo`: everything at once, in about four minutes, without a network."""

from __future__ import annotations

from pathlib import Path

from stoker import streams
from stoker.cli import parsing
from stoker.errors import UserError

__all__ = ["main"]


def main(argv: list[str]) -> int:
    parser = parsing.Parser(
        "demo", "teach a small model to answer questions about an invented world, in about four minutes"
    )
    parser.add_argument(
        "--output_dir",
        type=parsing.path,
        default="stoker-demo",
        metavar="DIR",
        help="where everything goes (stoker-demo)",
    )
    parser.add_argument("--seconds", type=parsing.seconds, default=170.0, metavar="S", help="time for training (170)")
    parser.add_argument("--questions", type=parsing.count, metavar="N", help="train on so many, whatever the time")
    parser.add_argument("--seed", type=parsing.whole, default=7, metavar="N", help="another world")
    parser.add_argument("--model", type=parsing.path, metavar="DIR", help="another model than MiniLM")
    parser.add_argument("--no-compare", action="store_true", help="skip the comparison with stock")
    options = parser.parse_args(argv)
    if options.questions is not None and not 12 <= options.questions <= 3000:
        raise UserError(f"--questions is {options.questions}; it must be from 12 to 3000")
    try:
        import transformers  # noqa: F401
    except ImportError:
        raise UserError("the demo needs transformers and accelerate: pip install 'stoker[demo]'") from None
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
