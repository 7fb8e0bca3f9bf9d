"""`stoker runs DIR...`: compares training runs in a table, as JSON, or on a page with their curves over each other."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from stoker.cli import parsing
from stoker.errors import UserError, first_line
from stoker.run_report.compare import Comparison, RunSummary
from stoker.run_report.compare_texts import figures, setting
from stoker.run_report.log import plain
from stoker.user_files import check_replaceable

__all__ = ["main"]

_EXAMPLES = """examples:
  stoker runs out                            every run in the folders below out
  stoker runs out/a out/b --by eval_loss     the lowest loss first
  stoker runs out --html compare.html        curves over each other"""
_NAME_SHOWN = 32
_WIDE = 240  # columns, where the output is a file or a pipe


def main(argv: list[str]) -> int:
    parser = parsing.Parser(
        "runs", "compare training runs: settings that differ, best score, speed, duration, status", examples=_EXAMPLES
    )
    parser.add_argument(
        "folders", type=parsing.path, nargs="+", metavar="DIR", help="runs, or folders with runs below them"
    )
    parser.add_argument(
        "--by", type=parsing.path, metavar="METRIC", help="sort by it: f1, loss, tokens_per_second, duration, ..."
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--html", type=parsing.path, metavar="FILE", help="write a page with the curves of the best ten"
    )
    options = parser.parse_args(argv)
    if options.html:
        check_replaceable(options.html, "--html")
    found = Comparison.of([Path(folder) for folder in options.folders], options.by)
    if options.html:
        _write_page(found, Path(options.html))
    if options.json:
        json.dump(plain(_as_json(found)), sys.stdout, indent=2, allow_nan=False)
        print()
    else:
        _print_table(found)
    if options.html:
        print(options.html, file=sys.stderr if options.json else sys.stdout)
    return 0


def _write_page(found: Comparison, path: Path) -> None:
    try:
        from stoker.run_report.overlay import render_overlay
        from stoker.run_report.page import write_html
    except ImportError as error:
        raise UserError(
            f"--html needs matplotlib and Jinja2: pip install 'stoker[report]' ({first_line(error)})"
        ) from None
    write_html(render_overlay(found), path)


def _as_json(found: Comparison) -> dict[str, Any]:
    differing = found.differing
    return {
        "by": found.metric,
        "runs": [_run_as_json(one, found, {name: values[i] for name, values in differing.items()})
                 for i, one in enumerate(found.runs)],
    }  # fmt: skip


def _run_as_json(one: RunSummary, found: Comparison, settings: dict[str, Any]) -> dict[str, Any]:
    best = one.best(found.metric) if found.metric else None
    return {
        "folder": str(one.folder),
        "status": one.state.name,
        "details": one.state.details,
        "best": None if best is None else {"value": best.value, "step": best.step},
        "tokens_per_second": one.tokens_per_second,
        "seconds": round(one.run.seconds, 3),
        "steps": one.run.steps[-1]["step"] if one.run.steps else 0,
        "settings": settings,
        "skipped_lines": one.run.bad_lines,
    }


def _print_table(found: Comparison) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, emoji=False, width=_WIDE)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    differing = found.differing
    for name in ("", "run", "status", found.metric_name or "score", "tokens/s", "duration", *differing):
        numeric = name in ("", found.metric_name, "tokens/s", "duration")
        table.add_column(Text(_short(name)), justify="right" if numeric else "left", overflow="fold")
    tones = {"good": "green", "bad": "red", "busy": "blue", "idle": "dim"}
    for number, one in enumerate(found.runs):
        cells = [Text(str(number + 1)), Text(_short(one.name)), Text(one.state.label, style=tones[one.state.tone])]
        cells += [Text(text) for text in figures(one, found.metric)]
        table.add_row(*cells, *(Text(setting(values[number])) for values in differing.values()))
    console.print(table)
    damaged = sum(one.run.bad_lines for one in found.runs)
    if damaged:
        lines = "1 damaged line" if damaged == 1 else f"{damaged:,} damaged lines"
        print(f"stoker: skipped {lines} of these logs", file=sys.stderr)


def _short(text: str) -> str:
    shown = "".join(letter if letter.isprintable() else "?" for letter in text)
    return shown if len(shown) <= _NAME_SHOWN else "..." + shown[3 - _NAME_SHOWN :]
