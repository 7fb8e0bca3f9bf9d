"""Data sets of the Hugging Face hub, through the optional `datasets` package; everything else here works without it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from stoker.errors import UserError
from stoker.tasks.files import Row

__all__ = ["load_split"]


def _package(wanted: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise UserError(
            f"--dataset_name {wanted} comes from the hub, which needs the datasets package: pip install 'stoker[hub]'; "
            "files of your own (--train_file, --validation_file) need nothing"
        ) from None
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    return datasets


def _load(name: str, config: str | None, cache_dir: str | None) -> Any:
    datasets = _package(name)
    try:
        found = datasets.load_dataset(name, config, cache_dir=cache_dir)
    except Exception as error:  # the package raises many kinds; the first line says it in words
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"the data set {name}{f' ({config})' if config else ''} cannot be loaded: {reason}; without a network, "
            "give files by --train_file and --validation_file"
        ) from None
    return found


def load_split(name: str, config: str | None, split: str, cache_dir: str | None) -> Iterator[Row]:
    """The rows of one split; UserError if it has none of that name."""
    found = _load(name, config, cache_dir)
    if split not in found:
        raise UserError(f"the data set {name} has no split {split!r}; it has {', '.join(found)}")
    for number, values in enumerate(found[split], 1):
        yield Row(dict(values), f"{name}[{split}], row {number}")
