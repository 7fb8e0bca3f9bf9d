"""`stoker report DIR`: generates report.html from a run's log, even if the run was killed."""

from __future__ import annotations

import sys
from pathlib import Path

from stoker.cli import parsing
from stoker.errors import UserError, first_line
from stoker.user_files import check_replaceable, require_run_folder

__all__ = ["main"]


def main(argv: list[str]) -> int:
    parser = parsing.Parser("report", "generate the report page of a training run, finished or not, from its log")
    parser.add_argument("folder", type=parsing.path, metavar="DIR", help="the run's --output_dir")
    parser.add_argument("--output", type=parsing.path, metavar="FILE", help="where to write the page (DIR/report.html)")
    options = parser.parse_args(argv)
    folder = Path(options.folder)
    require_run_folder(folder)
    try:
        from stoker.run_report.log import read_run
        from stoker.run_report.page import write_page
    except ImportError as error:
        raise UserError(
            f"the report needs matplotlib and Jinja2: pip install 'stoker[report]' ({first_line(error)})"
        ) from None
    check_replaceable(options.output or folder / "report.html", "--output")
    try:
        run = read_run(folder)
    except FileNotFoundError:
        raise UserError(
            f"{folder} has no run.jsonl, the log of a training run; is it the --output_dir of a run?"
        ) from None
    except OSError as error:
        raise UserError(f"{folder / 'run.jsonl'} cannot be read: {error.strerror}") from None
    if not run.lines:
        raise UserError(f"{folder / 'run.jsonl'} is still empty; generate the page when the run has begun")
    print(write_page(run, Path(options.output) if options.output else folder / "report.html"))
    if run.bad_lines:
        print(f"stoker: in {folder / 'run.jsonl'}, {run.bad_lines_note}", file=sys.stderr)
    return 0
