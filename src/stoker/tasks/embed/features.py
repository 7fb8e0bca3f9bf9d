"""Rows of texts as sentence-transformers' trainer takes them: a data set with a column per text, and the tokens of all texts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from stoker.errors import UserError
from stoker.tasks.sentences.losses import Loss
from stoker.tasks.sentences.text_rows import LABELLED, SCORED, TextRows
from stoker.tasks.sentences.token_table import TokenTable

__all__ = ["Prompts", "check_rows", "label_scale", "make_datasets", "usable_for"]

_RESERVED = {"label", "labels", "score", "scores", "dataset_name", "return_loss"}
"""Columns that sentence-transformers does not take for texts."""


@dataclass(frozen=True)
class Prompts:
    """What is put before the texts of pairs and triplets."""

    query: str = ""
    document: str = ""

    def of(self, rows: TextRows) -> list[str]:
        return [self.query, *[self.document] * (len(rows.columns.texts) - 1)]

    def by_column(self, rows: Mapping[str, TextRows]) -> dict[str, str] | None:
        """As sentence-transformers' arguments name them; None if there are none."""
        if not self.query and not self.document:
            return None
        return {name: prompt for one in rows.values() for name, prompt in zip(_names(one), self.of(one), strict=True)}

    def with_texts(self, rows: TextRows) -> Iterator[tuple[str, str]]:
        prompts = self.of(rows)
        for texts in rows.texts:
            yield from zip(prompts, texts, strict=True)


def check_rows(loss: Loss, rows: TextRows, batch_size: int) -> None:
    """Raises UserError for rows or batches from which the loss cannot learn."""
    if loss.name == "TripletLoss" and len(rows.columns.texts) != 3:
        raise UserError(
            "--loss TripletLoss takes one negative for each pair; use MultipleNegativesRankingLoss for several"
        )
    if loss.scores == "binary" and (wrong := sorted({*rows.labels} - {0.0, 1.0})):
        raise UserError(
            f"--loss {loss.name} takes pairs with the labels 0 and 1, and one has {wrong[0]:g}; use CoSENTLoss"
        )
    if rows.kind == SCORED and len({*rows.labels}) < 2:
        raise UserError(f"all pairs have the score {rows.labels[0]:g}; nothing can be learned from them")
    if loss.sampler == "group_by_label":
        if batch_size < 4 or batch_size % 2:
            raise UserError(
                f"--per_device_train_batch_size {batch_size}: with {loss.name} it must be an even number, 4 or more"
            )
        if sum(count > 1 for count in Counter(rows.labels).values()) < 2:
            raise UserError(f"{loss.name} needs two or more classes with two or more texts each")


def usable_for(loss: Loss, rows: TextRows) -> bool:
    """Whether the loss can be computed on validation rows; those of another kind are measured by the evaluator alone."""
    try:
        check_rows(loss, rows, batch_size=4)
    except UserError:
        return False
    return rows.kind in loss.kinds


def label_scale(loss: Loss, rows: TextRows) -> float:
    """By what scores are divided, so that they can be compared with cosines."""
    return max([1.0, *map(abs, rows.labels)]) if loss.scores == "unit" else 1.0


def make_datasets(
    rows: Mapping[str, TextRows], model: Any, prompts: Prompts, *, scale: float = 1.0, fresh: bool = False
) -> tuple[dict[str, Any], TokenTable]:
    """A data set for each split, which knows the tokens of its rows (`lengths`), and the table of tokens."""
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()
    table = TokenTable.build(model, (one for split in rows.values() for one in prompts.with_texts(split)), fresh=fresh)
    classes = dict.fromkeys(label for one in rows.values() if one.kind == LABELLED for label in one.labels)
    numbers = {name: number for number, name in enumerate(classes)}
    sets: dict[str, Any] = {}
    for split, one in rows.items():
        columns: dict[str, Any] = {name: one.column(n) for n, name in enumerate(_names(one))}
        if one.kind == SCORED:
            columns["label"] = [label / scale for label in one.labels]
        elif one.kind == LABELLED:
            columns["label"] = [numbers[label] for label in one.labels]
        sets[split] = Dataset.from_dict(columns)
        sets[split].lengths = table.lengths(prompts.with_texts(one)).reshape(len(one), -1).sum(1)
    return sets, table


def _names(rows: TextRows) -> list[str]:
    return [f"text_{n}" if name.lower() in _RESERVED else name for n, name in enumerate(rows.columns.texts, 1)]
