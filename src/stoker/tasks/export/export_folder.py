"""The folder of an export: written beside its place and renamed when it is complete, so that a kill leaves no half of it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from stoker.errors import UserError
from stoker.hf.checkpointing import folders
from stoker.whole_files import write_text

__all__ = ["check_target", "staged", "write_facts"]

_FACTS = "export.json"
"""What was exported, and the comparison; it marks folders that a later export may replace."""
_HARDLY_ANY = 1 << 20


def check_target(source: Path, target: Path) -> None:
    """Raises UserError if the export would replace something else."""
    if target.resolve() == source.resolve():
        raise UserError(f"--output_dir {target} is the model itself; name another folder")
    if target.exists() and not target.is_dir():
        raise UserError(f"--output_dir {target} is a file; name a folder")
    if target.is_dir() and any(target.iterdir()) and not (target / _FACTS).is_file():
        raise UserError(f"--output_dir {target} contains other files; name a new folder, or delete it")
    if not os.access(_existing(target), os.W_OK):
        raise UserError(f"--output_dir {target} cannot be written; choose another folder")


def _existing(path: Path) -> Path:
    return next(one for one in (path, *path.absolute().parents) if one.is_dir())


@contextlib.contextmanager
def staged(target: Path) -> Iterator[Path]:
    """A temporary folder that takes the place of `target` at the end, unless an error is raised."""
    beside, old = (target.parent / f".{target.name}.{state}" for state in ("partial", "replaced"))
    if old.is_dir() and not target.exists():  # a kill between the two renames below
        os.rename(old, target)
    for left in (beside, old):
        shutil.rmtree(left, ignore_errors=True)
    beside.mkdir(parents=True)
    try:
        yield beside
        folders.make_durable(beside)
        if target.exists():
            os.rename(target, old)
        os.rename(beside, target)
    except UserError:
        raise
    except Exception as error:
        # A library that only says that it cannot write has failed for lack of space if hardly any is left.
        if folders.disk_is_full(error, beside, _HARDLY_ANY) or shutil.disk_usage(beside).free < _HARDLY_ANY:
            sentence = folders.shortage(beside.parent, f"the export {target.name}")
            raise UserError(f"{sentence}; make room, or name a folder on another disk with --output_dir") from None
        raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)


def write_facts(folder: Path, facts: Mapping[str, object]) -> None:
    write_text(folder / _FACTS, json.dumps(facts, indent=2, ensure_ascii=False) + "\n")
