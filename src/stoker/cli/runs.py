"""`stoker runs DIR...`: compares training runs in a table, as JSON, or on a page with their curves over each other."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stoker.cli import parsing
from stoker.english import counted
from stoker.errors import UserError, first_line
from stoker.run_report.compare import Comparison, RunSummary, compare_by_task
from stoker.run_report.compare_texts import figures, setting
from stoker.run_report.log import plain
from stoker.user_files import check_replaceable

__all__ = ["main"]

_EXAMPLES = """examples:
  stoker runs out                            every run in the folders below out
  stoker runs out/a out/b --by eval_loss     the lowest loss first
  stoker runs out --html compare.html        curves over each other"""
_NAME_SHOWN = 32
_VALUE_SHOWN = 24
_WIDE = 240  # columns, where the output is a file or a pipe


def main(argv: list[str]) -> int:
    parser = parsing.Parser(
        "runs",
        "compare training runs, task by task: best score, speed, duration, settings that differ",
        examples=_EXAMPLES,
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
    found = compare_by_task([Path(folder) for folder in options.folders], options.by)
    if options.html:
        _write_page(found, Path(options.html))
    if options.json:
        json.dump(plain(_as_json(found)), sys.stdout, indent=2, allow_nan=False)
        print()
    else:
        _print_tables(found)
    if options.html:
        print(options.html, file=sys.stderr if options.json else sys.stdout)
    return 0


def _write_page(found: Sequence[Comparison], path: Path) -> None:
    try:
        from stoker.run_report.overlay import render_overlay
        from stoker.run_report.page import write_html
    except ImportError as error:
        raise UserError(
            f"--html needs matplotlib and Jinja2: pip install 'stoker[report]' ({first_line(error)})"
        ) from None
    write_html(render_overlay(found), path)


def _as_json(found: Sequence[Comparison]) -> dict[str, Any]:
    metrics = {one.metric for one in found}
    return {
        "by": metrics.pop() if len(metrics) == 1 else None,
        "runs": [run for one in found for run in _runs_as_json(one)],
    }


def _runs_as_json(found: Comparison) -> list[dict[str, Any]]:
    differing = found.differing
    return [
        _run_as_json(one, found, {name: values[i] for name, values in differing.items()})
        for i, one in enumerate(found.runs)
    ]


def _run_as_json(one: RunSummary, found: Comparison, settings: dict[str, Any]) -> dict[str, Any]:
    best = one.best(found.metric) if found.metric else None
    return {
        "folder": str(one.folder),
        "task": found.task or None,
        "status": one.state.name,
        "details": one.state.details,
        "by": found.metric,
        "best": None if best is None else {"value": best.value, "step": best.step},
        "tokens_per_second": one.tokens_per_second,
        "seconds": round(one.run.seconds, 3),
        "steps": one.run.steps[-1]["step"] if one.run.steps else 0,
        "settings": settings,
        "skipped_lines": one.run.bad_lines,
    }


def _print_tables(found: Sequence[Comparison]) -> None:
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, emoji=False, width=_WIDE)
    for number, one in enumerate(found):
        if len(found) > 1:
            console.print(
                f"{'' if number == 0 else chr(10)}{one.task or 'other runs'}, {counted(len(one.runs), 'run')}"
            )
        _print_table(one, console)
    damaged = sum(run.run.bad_lines for one in found for run in one.runs)
    if damaged:
        lines = "1 damaged line" if damaged == 1 else f"{damaged:,} damaged lines"
        print(f"stoker: skipped {lines} of these logs", file=sys.stderr)


def _print_table(found: Comparison, console: Any) -> None:
    """The table with the most important settings that fit into the width; the names of the others follow it."""
    shown: list[str] = []
    table = _table(found, shown)
    for name in found.important:
        wider = _table(found, [*shown, name])
        if len(shown) < len(found.columns) and console.measure(wider).minimum <= console.width - 2 * len(wider.columns):
            shown.append(name)
            table = wider
    console.print(table)
    if note := found.also_differ_in(shown):
        console.print("".join(one if one.isprintable() else "?" for one in note), soft_wrap=True)


def _table(found: Comparison, settings: Sequence[str]) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    unequal = len({one.state.label for one in found.runs} | {"finished"}) > 1
    values = [found.differing[name] for name in settings]
    for name in (
        "",
        "run",
        *(["status"] if unequal else []),
        found.metric_name or "score",
        "tokens/s",
        "duration",
        *settings,
    ):
        numeric = name in ("", found.metric_name, "tokens/s", "duration")
        table.add_column(Text(_short(name)), justify="right" if numeric else "left", no_wrap=True)
    tones = {"good": "green", "bad": "red", "busy": "blue", "idle": "dim"}
    for number, one in enumerate(found.runs):
        cells = [Text(str(number + 1)), Text(_short(one.name))]
        cells += [Text(one.state.label, style=tones[one.state.tone])] if unequal else []
        cells += [Text(text) for text in figures(one, found.metric)]
        table.add_row(*cells, *(Text(_tail(setting(column[number]))) for column in values))
    return table


def _short(text: str) -> str:
    shown = "".join(letter if letter.isprintable() else "?" for letter in text)
    return shown if len(shown) <= _NAME_SHOWN else "..." + shown[3 - _NAME_SHOWN :]


def _tail(text: str) -> str:
    """The end of a long value, by which paths differ."""
    return text if len(text) <= _VALUE_SHOWN else "..." + text[3 - _VALUE_SHOWN :]
