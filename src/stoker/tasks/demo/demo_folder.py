"""The output folder of a demo: new, empty, or one that an earlier demo has marked as its own and may be emptied."""

from __future__ import annotations

import shutil
from pathlib import Path

from stoker.errors import UserError

__all__ = ["check_folder", "prepare_folder"]

_MARKER = ".stoker-demo"
_MARKER_TEXT = """`stoker demo` created this folder and empties it when it runs again. It leaves a folder without this file alone.
"""


def check_folder(folder: Path) -> None:
    """Accepts only a new folder, an empty one, or one that an earlier demo has marked."""
    try:
        used = folder.exists() and any(folder.iterdir())
    except OSError as error:
        raise UserError(f"--output_dir {folder} cannot be used: {error.strerror}") from None
    if used and not (folder / _MARKER).is_file():
        raise UserError(f"{folder} is not empty and was not created by a demo; name another folder with --output_dir")


def prepare_folder(folder: Path) -> None:
    """Empties the folder of an earlier demo, or creates a new one, and marks it."""
    check_folder(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name != _MARKER:
                path.unlink()
        (folder / _MARKER).write_text(_MARKER_TEXT, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--output_dir {folder} cannot be used: {error.strerror} ({error.filename})") from None
