"""Checks the columns of a data file by its first row, with what the tasks themselves use, before anything else is read.

Imports no torch. Files whose beginning does not tell are left to the tasks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stoker.errors import UserError
from stoker.tasks.files import first_row, kind_of

__all__ = ["check_columns"]


def check_columns(task: str, path: Path, options: Any, split: str) -> None:
    """Raises UserError if the first row of a file does not have the columns that the task needs in this split."""
    check = _CHECKS.get(task)
    if check is not None:
        check(path, options, split != "test")


def _qa(path: Path, options: Any, labelled: bool) -> None:
    if kind_of(path) in ("json", "jsonl"):  # whose rows may differ in their columns
        return
    if (row := first_row(path)) is None:
        return
    answers = labelled and not {"answers", "answer_start"} & row.values.keys()
    missing = [name for name in ("question", "context") if name not in row.values] + ["answers"] * answers
    if missing:
        raise UserError(
            f"{path} has no column {missing[0]!r}; its columns are {', '.join(map(str, row.values))}; rename its columns"
        )


def _classify(path: Path, options: Any, labelled: bool) -> None:
    from stoker.tasks.classify.data import columns_of, text_columns

    if (row := first_row(path)) is not None:
        texts = text_columns(options.text_column_names)
        glue = (getattr(options, "task_name", None) or "").lower() or None
        columns_of(row, texts, options.label_column_name, glue, labelled=labelled)


def _ner(path: Path, options: Any, labelled: bool) -> None:
    from stoker.tasks.ner.data import Columns, conll_layout, is_conll, layout_of

    columns = Columns(options.text_column_name, options.label_column_name)
    if is_conll(path):
        conll_layout(columns)
    elif (row := first_row(path)) is not None:
        layout_of(row.values, columns, labelled)


def _mlm(path: Path, options: Any, labelled: bool) -> None:
    from stoker.tasks.mlm.texts import is_table, likeliest_column

    if options.text_column_name is None and is_table(path) and (row := first_row(path)) is not None:
        likeliest_column(row.values)


def _sft(path: Path, options: Any, labelled: bool) -> None:
    from stoker.tasks.sft.data import recognised

    if (row := first_row(path, texts=True)) is not None:
        recognised(list(row.values), str(path), pairs=options.dpo)


def _sentences(path: Path, options: Any, labelled: bool) -> None:
    from stoker.tasks.sentences.text_rows import choose_columns, column_list

    texts = column_list(options.text_column_names, "--text_column_names")
    names = column_list(options.column_names, "--column_names")
    if (row := first_row(path, header=names)) is not None:
        choose_columns([str(name) for name in row.values], texts, options.label_column_name, str(path))


_CHECKS = {
    "qa": _qa, "classify": _classify, "fewshot": _classify, "ner": _ner, "mlm": _mlm, "sft": _sft, "embed": _sentences,
    "rerank": _sentences,
}  # fmt: skip
