"""A loss or weights that are NaN or infinite end the run: the error names the step and the examples of that batch.

Weights that are not finite are never saved, so the last good checkpoint stays the newest.
"""

from __future__ import annotations

import math
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from transformers.trainer_utils import has_length

from stoker.distributed.agreement import largest
from stoker.errors import UserError
from stoker.hf.checkpointing import folders
from stoker.hf.seeded_batches import indices_of

if TYPE_CHECKING:
    from stoker.hf.batches import Position

__all__ = ["NonFiniteLoss", "require_finite_loss", "require_finite_weights"]


class NonFiniteLoss(UserError):
    """The loss, or the weights, became NaN or infinite; the message names the step and, of a loss, the examples."""


def require_finite_loss(trainer: Any, loss: torch.Tensor, position: Position) -> None:
    """Raises NonFiniteLoss unless the loss of the batch at `position` is finite."""
    # The number itself is at hand on a CPU; the operators that look at it cost more than reading it.
    if math.isfinite(loss.item()) if loss.numel() == 1 else bool(torch.isfinite(loss).all()):
        return
    ids = _example_ids(trainer, position)
    examples = f" (examples {', '.join(ids[:8])}{', ...' if len(ids) > 8 else ''})" if ids else ""
    found = f"the loss is {loss.mean().item()} at step {trainer.state.global_step + 1}{examples}"
    raise NonFiniteLoss(_message(trainer, found))


def require_finite_weights(trainer: Any, *, together: bool) -> None:
    """Raises NonFiniteLoss unless all weights are finite; with `together`, on all ranks if on any. Then a collective."""
    bad = int(not _finite(trainer.model))
    if largest(bad) if together else bad:
        raise NonFiniteLoss(
            _message(trainer, f"the weights are no longer finite after step {trainer.state.global_step}")
        )


def _finite(model: nn.Module) -> bool:
    trained = [p.detach() for p in model.parameters() if p.requires_grad]
    # A sum is not finite if one of its terms is not; it reads each weight once and keeps nothing.
    if np.isfinite(sum(float(p.float().sum()) for p in trained)):
        return True
    return all(bool(torch.isfinite(p).all()) for p in trained)  # a sum of large weights may overflow by itself


def _message(trainer: Any, found: str) -> str:
    last = folders.last_good(Path(trainer._get_output_dir(None)))
    kept = f"the last good checkpoint is {last}" if last else "no checkpoint had been written"
    return f"{found}; nothing of that step was saved, {kept}; try a lower --learning_rate"


def _example_ids(trainer: Any, position: Position) -> list[str]:
    """The examples of the batch at `position`, found by iterating over the sampler again; empty if that is impossible."""
    loader = trainer.callback_handler.train_dataloader
    sampler = getattr(loader, "batch_sampler", None)
    if sampler is None or not has_length(loader):
        return []
    epoch, batch = position.in_epoch(len(loader), trainer.args, trainer.state.global_step)
    try:
        owners: tuple[Any, ...] = (loader, sampler, getattr(sampler, "sampler", None))
        for owner in owners:
            if hasattr(owner, "set_epoch"):
                owner.set_epoch(epoch)
        indices = indices_of(next(islice(iter(sampler), batch, None), []))
        name = getattr(trainer.train_dataset, "example_ids", None)
        return [str(one) for one in (name(indices) if name is not None else indices)]
    except Exception:  # a custom sampler may raise anything; the loss is what must be reported
        return []
