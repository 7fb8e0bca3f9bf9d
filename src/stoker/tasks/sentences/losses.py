"""The losses of sentence-transformers by their names: which rows each takes, and how its batches are formed."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stoker.documents import BadDocument, parse_json
from stoker.errors import UserError, one_line
from stoker.tasks.sentences.text_rows import LABELLED, PAIRS, SCORED, TRIPLETS

__all__ = ["DEFAULTS", "LOSSES", "Loss", "loss_for", "loss_settings", "make_loss"]


@dataclass(frozen=True)
class Loss:
    name: str
    kinds: tuple[str, ...]
    """The kinds of rows that it takes."""
    sampler: str = "batch_sampler"
    """sentence-transformers' way to form batches: without duplicates where the other rows of a batch are negatives, by label
    where rows of the same class are needed."""
    cached: bool = False
    """Computes a large batch in mini-batches, twice, instead of keeping all activations."""
    gathers: bool = False
    """Can use the rows of all processes as negatives."""
    scores: str | None = None
    """`unit`: scores must be between -1 and 1; `share`: between 0 and 1; `binary`: 0 or 1; None: only their order matters."""

    @property
    def in_batch(self) -> bool:
        """Whether the other rows of a batch are negatives, so that larger batches are better."""
        return self.sampler == "no_duplicates"


_APART = "no_duplicates"
_BY_LABEL = "group_by_label"

LOSSES = {
    one.name: one
    for one in (
        Loss("MultipleNegativesRankingLoss", (PAIRS, TRIPLETS), _APART, gathers=True),
        Loss("CachedMultipleNegativesRankingLoss", (PAIRS, TRIPLETS), _APART, cached=True, gathers=True),
        Loss("TripletLoss", (TRIPLETS,)),
        Loss("CoSENTLoss", (SCORED,)),
        Loss("AnglELoss", (SCORED,)),
        Loss("CosineSimilarityLoss", (SCORED,), scores="unit"),
        Loss("ContrastiveLoss", (SCORED,), scores="binary"),
        Loss("OnlineContrastiveLoss", (SCORED,), scores="binary"),
        Loss("BatchAllTripletLoss", (LABELLED,), _BY_LABEL),
        Loss("BatchHardTripletLoss", (LABELLED,), _BY_LABEL),
        Loss("BatchHardSoftMarginTripletLoss", (LABELLED,), _BY_LABEL),
        Loss("BatchSemiHardTripletLoss", (LABELLED,), _BY_LABEL),
    )
}
DEFAULTS = {
    PAIRS: "MultipleNegativesRankingLoss",
    TRIPLETS: "MultipleNegativesRankingLoss",
    SCORED: "CoSENTLoss",
    LABELLED: "BatchAllTripletLoss",
}


def loss_for(
    kind: str, columns: str, asked: str | None, losses: Mapping[str, Loss], defaults: Mapping[str, str]
) -> Loss:
    """The loss that --loss names, or the default for this kind of rows; `columns` are theirs, for messages."""
    if kind not in defaults:
        raise UserError(f"the training data has {kind} ({columns}); needed are {', '.join(defaults)}")
    if asked is None:
        return losses[defaults[kind]]
    by_lower = {name.lower(): name for name in losses}
    name = by_lower.get(asked.lower()) or by_lower.get(f"{asked.lower()}loss")
    fitting = [one for one in losses if kind in losses[one].kinds]
    if name is None:
        close = difflib.get_close_matches(asked, losses, n=1, cutoff=0.5)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise UserError(f"--loss {asked} is unknown{hint}; for {kind}, choose one of {', '.join(fitting)}")
    if kind not in losses[name].kinds:
        raise UserError(
            f"--loss {name} takes {' or '.join(losses[name].kinds)}, and the training data has {kind} ({columns}); choose one of "
            f"{', '.join(fitting)}, or name other columns with --text_column_names and --label_column_name"
        )
    return losses[name]


def loss_settings(text: str | None) -> dict[str, Any]:
    """--loss_kwargs as a dictionary."""
    if text is None:
        return {}
    try:
        found = parse_json(text)
    except BadDocument as error:
        raise UserError(f"--loss_kwargs is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise UserError(f"--loss_kwargs {text}: write names and values as JSON, such as '{{\"scale\": 20}}'")
    return found


def make_loss(module: Any, loss: Loss, model: Any, settings: dict[str, Any]) -> Any:
    """The loss as an object; `module` is the one that sentence-transformers has it in."""
    kind = getattr(module, loss.name, None)
    if kind is None:
        raise UserError(f"the installed sentence-transformers has no {loss.name}; update it, or choose another --loss")
    try:
        return kind(model, **settings)
    except (TypeError, ValueError) as error:
        raise UserError(f"--loss {loss.name} with {settings} cannot be used: {one_line(error)}") from None
