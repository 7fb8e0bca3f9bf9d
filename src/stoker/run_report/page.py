"""report.html: one self-contained page about a run, generated from its log.

`sections.py` and `plots.py` turn log entries into texts and figures; `page.html.jinja` inserts them into HTML and escapes them.
"""

from __future__ import annotations

from pathlib import Path

from markupsafe import Markup

from stoker.errors import UserError
from stoker.run_report.log import Run, read_run
from stoker.run_report.plots import (
    lengths_plot,
    loss_plot,
    phases_plot,
    scores_plot,
    speed_plot,
    throughput_plot,
    waits_plot,
)
from stoker.run_report.sections import sections
from stoker.run_report.templates import template
from stoker.whole_files import write_text

__all__ = ["render", "write_html", "write_page", "write_report"]


def write_report(folder: Path, output: Path | None = None) -> Path:
    """Generates the page from <folder>/run.jsonl. Raises FileNotFoundError if there is no log."""
    return write_page(read_run(folder), folder / "report.html" if output is None else output)


def write_page(run: Run, path: Path) -> Path:
    return write_html(render(run), path)


def write_html(page: str, path: Path) -> Path:
    """Writes a page atomically."""
    try:
        write_text(path, page, errors="replace")
    except FileNotFoundError:
        raise UserError(f"{path} cannot be written: there is no folder {path.parent}") from None
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from None
    return path


def render(run: Run) -> str:
    return template("page.html.jinja").render(plots=_plots(run), **sections(run))


def _plots(run: Run) -> list[tuple[Markup, str]]:
    plots = [
        (scores_plot(run), "On data that was not trained on."),
        (loss_plot(run), "The bold line is a running mean."),
        (throughput_plot(run), "Real tokens only; padding is not counted."),
        (lengths_plot(run), "The shaded part is what padding would add to the average row."),
        (phases_plot(run), ""),
        (waits_plot(run), "All ranks synchronize once per step; the last to arrive makes the others wait."),
        (speed_plot(run), run.others.get("speed", {}).get("note") or ""),
    ]
    return [(svg, caption) for svg, caption in plots if svg is not None]
