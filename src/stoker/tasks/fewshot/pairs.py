"""The examples that are trained on, and the pairs of them, both drawn by SetFit: 1 for two texts of a class, 0 for others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from stoker.errors import UserError
from stoker.tasks.classify.data import Example, Labels
from stoker.tasks.sentences.text_rows import Columns, TextRows

__all__ = ["STRATEGIES", "count_pairs", "make_pairs", "sample_examples"]

STRATEGIES = ["oversampling", "undersampling", "unique"]
_MOST = 2_000_000
"""Pairs; making more takes minutes and gigabytes, and training on them days."""


def sample_examples(examples: Sequence[Example], labels: Labels, per_class: int, seed: int) -> list[Example]:
    """At most so many examples of each class, those that `setfit.sample_dataset` takes with this seed."""
    from datasets import Dataset
    from setfit import sample_dataset

    rows = {"number": list(range(len(examples))), "label": [labels.number(one.label) for one in examples]}
    chosen = sample_dataset(Dataset.from_dict(rows), label_column="label", num_samples=per_class, seed=seed)
    return [examples[number] for number in chosen["number"]]


def count_pairs(classes: Sequence[int], strategy: str, iterations: int | None) -> int:
    """How many pairs SetFit makes of texts with these classes."""
    if iterations:
        return 2 * iterations * len(classes)
    sizes = Counter(classes).values()
    same = sum(size * (size + 1) // 2 for size in sizes)
    other = (len(classes) ** 2 - sum(size**2 for size in sizes)) // 2
    return {"unique": same + other, "oversampling": 2 * max(same, other), "undersampling": 2 * min(same, other)}[
        strategy
    ]


def make_pairs(
    texts: Sequence[str], classes: Sequence[int], *, strategy: str, iterations: int | None, most: int | None
) -> TextRows:
    """The pairs; `most`: how many the steps of training take, as SetFit limits them."""
    from setfit.sampler import ContrastiveDataset

    wanted = count_pairs(classes, strategy, iterations)
    if min(wanted, most or wanted) > _MOST:
        raise UserError(
            f"{len(texts):,} examples of {len({*classes})} classes make {wanted:,} pairs; limit them with --num_iterations 20 "
            f"({count_pairs(classes, strategy, 20):,} pairs), --max_steps or fewer --examples_per_class"
        )
    # SetFit would first make all pairs that there are, and then use the first of them.
    limits = [limit for limit in (most, wanted if iterations else None) if limit is not None]
    found = ContrastiveDataset(
        list(texts), list(classes), False, iterations, strategy, max_pairs=min(limits, default=-1)
    )
    pairs = [(pair["sentence_1"], pair["sentence_2"], pair["label"]) for pair in found]
    columns = Columns(("sentence_1", "sentence_2"), "label")
    return TextRows(columns, [(first, second) for first, second, _ in pairs], [label for *_, label in pairs])
