"""The user's cache directory: small JSON files with what was measured on this machine, none of them ever half written.

$STOKER_CACHE_DIR, else $XDG_CACHE_HOME/stoker, else ~/.cache/stoker. Losing it costs a measurement, nothing else, so a
broken file reads as a missing one; that it cannot be written is for the caller to say.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

__all__ = ["cache_directory", "load", "save"]


def cache_directory() -> Path | None:
    """Where the cache is, or would be; None if the user has no home."""
    if chosen := os.environ.get("STOKER_CACHE_DIR"):
        return Path(chosen)
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(xdg):  # the XDG specification says to ignore a relative one
        return Path(xdg) / "stoker"
    try:
        return Path.home() / ".cache" / "stoker"
    except RuntimeError:
        return None


def load(name: str) -> dict[str, Any] | None:
    """The contents of the file `name`; None if it is missing, unreadable or not what was written."""
    directory = cache_directory()
    if directory is None:
        return None
    try:
        data = json.loads((directory / name).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None


def save(name: str, data: dict[str, Any]) -> None:
    """Writes `name` beside and renames it into place. Raises OSError with a reason if that is not possible."""
    directory = cache_directory()
    if directory is None:
        raise OSError("no home directory; set STOKER_CACHE_DIR")
    directory.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{name}.", dir=directory)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(data, file, indent=1)
        os.replace(temporary, directory / name)
    except BaseException:
        os.unlink(temporary)
        raise
