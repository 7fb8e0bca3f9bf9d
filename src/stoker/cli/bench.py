"""`stoker bench`: stock transformers against Stoker on this machine, as a table, a JSON file and a plot."""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from stoker import streams
from stoker.bench.bench_stages import FULL, QUICK, STAGES
from stoker.cli import parsing
from stoker.errors import UserError, first_line

if TYPE_CHECKING:
    from stoker.bench.bench_results import Results

__all__ = ["main"]

_EXAMPLES = """examples:
  stoker bench                                everything, about ten minutes; files in stoker-bench/
  stoker bench --quick                        models with fewer layers, about a minute
  stoker bench --case bert-qa --case threads  only these
  stoker bench --out here/results             files in another folder
  stoker bench --quick --json | jq .steps     the figures for scripts

cases:
  bert-qa      BERT-base, question answering with token counts of SQuAD
  embeddings   MiniLM on 64 pairs of question and context
  lora         SmolLM2-135M with LoRA (with all weights if peft is missing)
  host         what a step costs besides its arithmetic
  threads      bert-qa with 1, 2, 4, ... threads
  allreduce    gloo against ccl, one rank per NUMA node (two on a single one)

Models have random weights, nothing is downloaded. Ctrl-C keeps what was measured.
"""


def main(argv: list[str]) -> int:
    parser = parsing.Parser(
        "bench", "measure stock transformers against Stoker on this machine, in about ten minutes", examples=_EXAMPLES
    )
    parser.add_argument("--quick", action="store_true", help="fewer layers and steps: about a minute")
    parser.add_argument(
        "--case", action="append", choices=STAGES, metavar="NAME", help="only this one of the cases below; repeatable"
    )
    parser.add_argument(
        "--out",
        type=parsing.path,
        default="stoker-bench",
        metavar="DIR",
        help="folder for bench.md, bench.json and bench.png (stoker-bench)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    options = parser.parse_args(argv)
    folder = _folder(options.out)
    parsing.require_transformers("stoker bench", extra="hf")
    streams.keep_running(output=False)

    from stoker.bench.bench_run import run

    stages = [stage for stage in STAGES if options.case is None or stage in options.case]
    # `timeout` and batch systems end a command by SIGTERM: it keeps what was measured, too.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        results = run(stages, QUICK if options.quick else FULL, sys.stderr, functools.partial(write, folder))
    finally:
        signal.signal(signal.SIGTERM, before)
    written = write(folder, results, plot=True)
    from stoker.bench.bench_table import markdown

    print(json.dumps(results.to_dict(), indent=1) if options.json else markdown(results), end="\n" * options.json)
    print(f"\nWritten: {', '.join(written)}", file=sys.stderr)
    return 130 if results.interrupted else 1 if results.empty else 0


def _folder(name: str) -> Path:
    """The folder, made now, so that ten minutes are not lost to a mistyped name."""
    folder = Path(os.path.expanduser(name))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        reason = "it is a file" if folder.is_file() else getattr(error, "strerror", None) or first_line(error)
        raise UserError(f"stoker bench: --out {name} cannot be a folder: {reason}; choose another place") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(
            f"stoker bench: --out {name} cannot be written; change its permissions, or choose another place"
        )
    return folder


def write(folder: Path, results: Results, plot: bool = False) -> list[str]:
    """Writes the files; without the plot after each stage, in case the machine does not let it finish."""
    from stoker.bench.bench_table import markdown
    from stoker.whole_files import write_text

    found = [("bench.json", json.dumps(results.to_dict(), indent=1) + "\n"), ("bench.md", markdown(results))]
    found += [("bench.log", results.log)] if results.log else []
    for name, text in found:
        write_text(folder / name, text)
    written = [str(folder / name) for name, _ in found]
    if plot and not results.empty:
        try:
            from stoker.bench.bench_plot import draw

            draw(results, folder / "bench.png")
            written.append(str(folder / "bench.png"))
        except ImportError:
            print("No plot: it needs matplotlib (pip install 'stoker[report]').", file=sys.stderr)
    return written
