"""Finds hard negatives with the model that is about to be trained: texts that it takes for an answer, and that are not.

sentence-transformers searches them; the result is stored in the cache, so that a resumed run trains on the same rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from stoker.distributed.agreement import from_first_rank, is_first_rank
from stoker.errors import UserError, one_line
from stoker.hf.checkpointing import random_state
from stoker.tasks.cache import Arrays, cached, fingerprint
from stoker.tasks.display import bars_in_terminals_only
from stoker.tasks.sentences.st_models import fast_inference
from stoker.tasks.sentences.text_rows import Columns, TextRows

__all__ = ["mine_negatives"]

_RANGE = 100
"""Only this many of the nearest texts are considered; further ones are not hard."""


def mine_negatives(
    rows: TextRows,
    model: Any,
    corpus: Sequence[str],
    number: int,
    *,
    margin: float,
    skip: int,
    batch_size: int = 32,
    optimized: bool = True,
    fresh: bool = False,
) -> TextRows:
    """The pairs of `rows`, each with `number` negatives from the second texts and `corpus`. A collective.

    `skip`: how many of the nearest texts are passed over; `margin`: how much less similar than the positive a negative must be,
    as a share of the positive's similarity. Both because the nearest texts are often right answers that nobody has labelled.
    """
    texts = list(dict.fromkeys([*rows.column(1), *corpus]))
    arrays: Arrays | None = None
    reason: str | None = None
    if is_first_rank():
        settings = [
            str(number),
            str(margin),
            str(skip),
            str(model.max_seq_length),
            str(model.prompts),
            _weights_digest(model),
        ]
        try:
            arrays, _ = cached(
                "negatives", fingerprint(settings, rows.column(0), rows.column(1), texts),
                lambda: _mined(rows, model, texts, number, margin, skip, batch_size, optimized), fresh=fresh,
            )  # fmt: skip
        except UserError as error:
            reason = str(error)
    arrays, reason = from_first_rank((arrays, reason))
    if arrays is None:
        raise UserError(reason or "no negatives were found")
    kept = [(*rows.texts[row], *(texts[one] for one in found)) for row, *found in arrays["found"].tolist()]  # type: ignore[attr-defined]
    names = (*rows.columns.texts, *(f"negative_{n}" for n in range(1, number + 1)))
    return TextRows(Columns(names, None), kept, [])


def _mined(
    rows: TextRows,
    model: Any,
    texts: list[str],
    number: int,
    margin: float,
    skip: int,
    batch_size: int,
    optimized: bool,
) -> Arrays:
    """An array with a row for each pair that has enough negatives: the number of the pair, then those of its negatives."""
    from datasets import Dataset
    from sentence_transformers.util import mine_hard_negatives

    if len(texts) < number + skip + 2:
        raise UserError(
            f"--mine_negatives {number} needs more texts to choose from: there are {len(texts)} different ones; name a file with "
            "further texts with --corpus_file"
        )
    pairs = Dataset.from_dict({"anchor": rows.column(0), "positive": rows.column(1)})
    prompts = {
        "query_prompt": model.prompts.get("query") or None,
        "corpus_prompt": model.prompts.get("document") or None,
    }
    try:
        with random_state.preserved(), fast_inference(model, optimized), bars_in_terminals_only():
            found = mine_hard_negatives(
                pairs, model, corpus=texts, num_negatives=number, range_min=skip,
                range_max=min(max(_RANGE, 4 * number) + skip, len(texts) - 1), relative_margin=margin or None,
                output_format="n-tuple", batch_size=batch_size, verbose=False, **prompts,
            )  # fmt: skip
    except (ValueError, RuntimeError) as error:
        raise UserError(f"--mine_negatives {number}: {one_line(error)}") from None
    # Pairs without enough negatives were left out, and some occur several times.
    places: dict[tuple[str, ...], list[int]] = {}
    for row, pair in enumerate(rows.texts):
        places.setdefault(pair, []).append(row)
    numbers = {text: n for n, text in enumerate(texts)}
    result = [
        [places[one["anchor"], one["positive"]].pop(0), *(numbers[one[f"negative_{n}"]] for n in range(1, number + 1))]
        for one in found
    ]
    return {"found": np.array(sorted(result), np.int64).reshape(-1, number + 1)}


def _weights_digest(model: Any) -> str:
    digest = hashlib.sha256()
    for name, weight in model.state_dict().items():
        digest.update(name.encode() + weight.detach().float().numpy().tobytes())
    return digest.hexdigest()
