"""Names and patterns (`texts/*.txt`) of files on the command line."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from pathlib import Path

from stoker.errors import UserError

__all__ = ["expand"]


def expand(patterns: Sequence[str], flag: str) -> list[Path]:
    """The files that names and patterns (`texts/*.txt`) stand for, in order, each once."""
    found: dict[str, None] = {}
    for pattern in patterns:
        path = os.path.expanduser(pattern)
        if os.path.exists(path) or not glob.has_magic(path):
            found[path] = None
            continue
        files = [name for name in sorted(glob.glob(path, recursive=True)) if os.path.isfile(name)]
        if not files:
            raise UserError(f"{flag} {pattern}: no file has a name like this")
        found |= dict.fromkeys(files)
    return [Path(name) for name in found]
