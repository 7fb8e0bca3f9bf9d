"""Atomic writes: a file is written under a temporary name beside its target and then renamed."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

__all__ = ["remove_unfinished", "write_text"]

_UNFINISHED = re.compile(r"\.(.+\.(conll|html|json|jsonl|md|txt))\.partial")


def write_text(path: Path, text: str, *, errors: str = "strict") -> None:
    """Replaces a file atomically: after a kill or a full disk the old file remains. Devices and pipes are written in place."""
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8", errors=errors)
        return
    beside = path.with_name(f".{path.name}.partial")
    try:
        beside.write_text(text, encoding="utf-8", errors=errors)
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise


def remove_unfinished(folder: Path) -> None:
    """Removes temporary files that a killed process has left."""
    with contextlib.suppress(OSError):
        for path in list(folder.iterdir()):
            if _UNFINISHED.fullmatch(path.name) and path.is_file() and not path.is_symlink():
                path.unlink(missing_ok=True)
