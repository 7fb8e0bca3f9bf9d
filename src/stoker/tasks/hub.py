"""Loads data sets from the Hugging Face hub with the optional `datasets` package."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from stoker.errors import UserError, first_line
from stoker.tasks.files import Row

__all__ = ["Split", "has_split", "load_split"]


@dataclass(frozen=True)
class Split:
    """One part of a data set."""

    name: str
    content: Iterable[dict[str, Any]]
    columns: dict[str, tuple[str, ...]]
    """For each column the names of its classes, in order; empty if it is neither a class label nor a list of them."""

    def rows(self, *, named: bool = True) -> Iterator[Row]:
        """The rows, with class names instead of numbers if `named`. The class -1 means that there is no label."""
        classes = {column: names for column, names in self.columns.items() if names}
        for number, found in enumerate(self.content, 1):
            values = dict(found)
            for column, names in classes.items():
                value = values[column]
                if isinstance(value, int) and (named or value < 0):
                    values[column] = names[value] if value >= 0 else None
                elif isinstance(value, list) and named:
                    values[column] = [names[one] if isinstance(one, int) and one >= 0 else one for one in value]
            yield Row(values, f"{self.name}, row {number}")


def import_package(wanted: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise UserError(
            f"--dataset_name {wanted} needs the datasets package: pip install 'stoker[hub]'; "
            "your own files (--train_file, --validation_file) do not need it"
        ) from None
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    return datasets


def _load(name: str, config: str | None, options: Any) -> Any:
    datasets = import_package(name)
    try:
        found = datasets.load_dataset(name, config, cache_dir=options.cache_dir, token=options.token)
    except Exception as error:  # the package raises many types of errors
        raise UserError(
            f"the data set {name}{f' ({config})' if config else ''} cannot be loaded: {first_line(error)}; without a network, "
            "name files with --train_file and --validation_file"
        ) from None
    return found


def has_split(name: str, config: str | None, split: str, options: Any) -> bool:
    return split in _load(name, config, options)


def load_split(name: str, config: str | None, split: str, options: Any) -> Split:
    """One split of a data set, with the cache folder and token of `options`; raises UserError if it does not exist."""
    found = _load(name, config, options)
    if split not in found:
        raise UserError(f"the data set {name} has no split {split!r}; it has {', '.join(found)}")
    features = getattr(found[split], "features", None) or {}
    return Split(
        f"{name}[{split}]",
        found[split],
        {column: _class_names(kind) for column, kind in features.items()},
    )


def _class_names(kind: Any) -> tuple[str, ...]:
    """The names of a class label, or of a list of class labels."""
    return tuple(getattr(kind, "names", ()) or getattr(getattr(kind, "feature", None), "names", ()))
