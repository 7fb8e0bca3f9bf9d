"""Which checkpoint a run goes on from, decided once for all ranks.

Rank 0 reads the files, the others only look whether theirs are there; what keeps one of them from resuming keeps all.
Every rank must call these functions.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from stoker.errors import UserError, first_line
from stoker.hf.checkpointing import folders, manifest

__all__ = ["damage_as_sentence", "damaged_weights", "named", "newest_whole", "of_first"]

Value = TypeVar("Value")


def newest_whole(folder: Path, since: float | None = None, without: Path | None = None) -> Path | None:
    """The checkpoint with most steps that all ranks can resume from, of those written after `since`; logs which are skipped.

    `without` is one whose damage is known already.
    """
    names = of_first([path.name for path in folders.candidates(folder, since) if path != without])
    for checkpoint in (folder / name for name in names):
        reason = _why_unusable(checkpoint)
        if reason is None:
            return checkpoint
        if _is_first():
            folders.warn_of_skipped(checkpoint, reason)
    return None


def named(checkpoint: Path) -> Path:
    """The checkpoint that somebody asked for by name; a damaged one is refused, for another would not be what was asked."""
    reason = _why_unusable(checkpoint)
    if reason is None:
        return checkpoint
    other = newest_whole(checkpoint.parent, without=checkpoint)
    way_out = (
        f"{other} is the newest that is whole, give that one" if other else "no other checkpoint beside it is whole"
    )
    if manifest.NAME in reason:
        way_out += f" (or delete {manifest.NAME} in it, if you have changed it yourself)"
    raise UserError(f"{checkpoint} cannot be resumed from: {reason}; {way_out}")


@contextlib.contextmanager
def damage_as_sentence(checkpoint: str | Path | None) -> Iterator[None]:
    """Loading fails only now if files without checksums have the right structure and wrong contents."""
    try:
        yield
    except (pickle.UnpicklingError, EOFError, LookupError, TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "PytorchStreamReader" not in str(error):
            raise
        reason = f"its state has no {error}" if isinstance(error, KeyError) else first_line(error)
        raise UserError(
            f"{checkpoint} cannot be resumed from: {reason}; give an earlier checkpoint by --resume_from_checkpoint"
        ) from error


def damaged_weights(checkpoint: Path) -> str | None:
    """What is wrong with the weights of a checkpoint, on any rank; None if nothing."""
    return _first_reason(manifest.why_damaged(checkpoint, read=_is_first(), weights_only=True))


def _why_unusable(checkpoint: Path) -> str | None:
    return _first_reason(folders.why_unusable(checkpoint, read=_is_first()))


def _first_reason(mine: str | None) -> str | None:
    if not _several():
        return mine
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return next((reason for reason in found if reason is not None), None)


def of_first(value: Value) -> Value:
    """What rank 0 has."""
    if not _several():
        return value
    told: list[Any] = [value]
    dist.broadcast_object_list(told, 0)
    found: Value = told[0]
    return found


def _several() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _is_first() -> bool:
    return not _several() or dist.get_rank() == 0
