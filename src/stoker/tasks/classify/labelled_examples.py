"""The labelled texts of a run's splits, from files or the hub, and the check of their classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stoker.errors import UserError
from stoker.numbers import finite_number
from stoker.tasks import hub
from stoker.tasks.classify.data import Example, Labels, choose_columns, collect, read_examples, text_columns
from stoker.tasks.faults import Faults
from stoker.tasks.training_run import Job, cut

__all__ = ["check_labels", "split_examples"]


def split_examples(
    job: Job, split: str, *, part: str = "", task: str | None = None, regression: bool = False
) -> tuple[Sequence[Example], tuple[str, ...]]:
    """The usable examples of a split, and the class names in order if a data set on the hub declares them.

    `part` is a suffix of the split's name on the hub, `task` a GLUE task.
    """
    options = job.data
    file, most = job.source(split)
    columns = text_columns(options.text_column_names)
    choices: dict[str, Any] = {
        "texts": columns, "label": options.label_column_name, "task": task,
        "regression": regression, "labelled": split != "test",
    }  # fmt: skip
    if file:
        return cut(read_examples(file, strict=options.strict, **choices), most), ()
    name, config = options.dataset_name, options.dataset_config_name
    if name is None:
        name, config = "nyu-mll/glue", task
    found = hub.load_split(name, config, split + part, job.model)
    faults = Faults(found.name, options.strict)
    examples = collect(found.rows(named=not regression), faults, **choices)
    faults.settle(len(examples))
    classes: tuple[str, ...] = ()
    if found.columns and split != "test":
        label = choose_columns(list(found.columns), columns, options.label_column_name, task).label
        classes = found.columns.get(str(label), ())
    return cut(examples, most), classes


def check_labels(labels: Labels, raw: Mapping[str, Sequence[Example]], *, for_numbers: str) -> None:
    """Raises UserError for labels that are not classes; `for_numbers` is what to use for numbers."""
    if len(labels.names) < 2:
        raise UserError(
            f"the label has {len(labels.names)} value ({', '.join(labels.names)}); classification needs two or more"
        )
    if _are_fractions(labels.names):
        raise UserError(
            f"the label is a fractional number ({labels.names[0]}, ...); use {for_numbers}, or name another "
            "column with --label_column_name"
        )
    for split, examples in raw.items():
        strange = sorted({str(e.label) for e in examples if e.label is not None} - set(labels.names))
        if strange:
            raise UserError(
                f"the {split} data has labels that the training data does not have: {', '.join(strange[:5])}"
            )


def _are_fractions(labels: Sequence[str]) -> bool:
    numbers = [finite_number(label) for label in labels]
    return None not in numbers and not all(float(number or 0).is_integer() for number in numbers)
