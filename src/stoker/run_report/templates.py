"""The HTML templates beside this file. They escape every value except the style sheets."""

from __future__ import annotations

import functools
from pathlib import Path

import jinja2
from markupsafe import Markup

from stoker.run_report.style import CSS, LIVE_CSS

__all__ = ["template"]


@functools.cache
def template(name: str) -> jinja2.Template:
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, loader=loader)
    environment.globals |= {"css": Markup(CSS), "live_css": Markup(LIVE_CSS)}
    return environment.get_template(name)
