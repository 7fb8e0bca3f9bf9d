"""Data sets of the Hugging Face hub, through the optional `datasets` package; everything else here works without it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from stoker.errors import UserError
from stoker.tasks.files import Row

__all__ = ["Split", "load_split"]


@dataclass(frozen=True)
class Split:
    """One part of a data set."""

    name: str
    content: Iterable[dict[str, Any]]
    columns: dict[str, tuple[str, ...]]
    """What is known of each column: the names of its classes in order, none if it holds something else."""

    def rows(self, *, named: bool = True) -> Iterator[Row]:
        """The rows, with the names of classes instead of their numbers if `named`; a class of -1 means none at all."""
        classes = {column: names for column, names in self.columns.items() if names}
        for number, found in enumerate(self.content, 1):
            values = dict(found)
            for column, names in classes.items():
                value = values[column]
                if isinstance(value, int) and (named or value < 0):
                    values[column] = names[value] if value >= 0 else None
            yield Row(values, f"{self.name}, row {number}")


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


def _load(name: str, config: str | None, options: Any) -> Any:
    datasets = _package(name)
    try:
        found = datasets.load_dataset(name, config, cache_dir=options.cache_dir, token=options.token)
    except Exception as error:  # the package raises many kinds; the first line says it in words
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"the data set {name}{f' ({config})' if config else ''} cannot be loaded: {reason}; without a network, "
            "give files by --train_file and --validation_file"
        ) from None
    return found


def load_split(name: str, config: str | None, split: str, options: Any) -> Split:
    """One split of a data set, kept where and opened by the token that `options` say; UserError if there is none."""
    found = _load(name, config, options)
    if split not in found:
        raise UserError(f"the data set {name} has no split {split!r}; it has {', '.join(found)}")
    features = getattr(found[split], "features", None) or {}
    return Split(
        f"{name}[{split}]",
        found[split],
        {column: tuple(getattr(kind, "names", ())) for column, kind in features.items()},
    )
