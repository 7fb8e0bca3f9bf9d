"""Which checkpoint a run resumes from, decided once for all ranks.

Rank 0 verifies the contents of the files, the other ranks check only that theirs exist; a checkpoint that one rank cannot
use is used by none. All ranks must call these functions, except `damage_as_user_error`.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator
from pathlib import Path

from stoker.distributed.agreement import from_all_ranks, from_first_rank, is_first_rank
from stoker.errors import UserError, first_line
from stoker.hf.checkpointing import folders, manifest

__all__ = ["damage_as_user_error", "damaged_weights", "named", "newest_usable"]


def newest_usable(folder: Path, since: float | None = None, without: Path | None = None) -> Path | None:
    """The checkpoint with most steps that all ranks can resume from, of those written after `since`; logs which are skipped.

    `without` is one that is known to be damaged.
    """
    names = from_first_rank([path.name for path in folders.candidates(folder, since) if path != without])
    for checkpoint in (folder / name for name in names):
        reason = _why_unusable(checkpoint)
        if reason is None:
            return checkpoint
        if is_first_rank():
            folders.warn_of_skipped(checkpoint, reason)
    return None


def named(checkpoint: Path) -> Path:
    """The checkpoint that the user named; UserError if it is damaged: another one is never used instead."""
    reason = _why_unusable(checkpoint)
    if reason is None:
        return checkpoint
    other = newest_usable(checkpoint.parent, without=checkpoint)
    way_out = (
        f"{other} is the newest complete one, give that instead"
        if other
        else "no other checkpoint beside it is complete"
    )
    if manifest.NAME in reason:
        way_out += f" (or delete {manifest.NAME} in it, if you have changed it yourself)"
    raise UserError(f"{checkpoint} cannot be resumed from: {reason}; {way_out}")


@contextlib.contextmanager
def damage_as_user_error(checkpoint: str | Path | None) -> Iterator[None]:
    """Around loading a checkpoint: files without checksums may have the right structure and wrong contents."""
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
    return _first_reason(manifest.why_damaged(checkpoint, read=is_first_rank(), weights_only=True))


def _why_unusable(checkpoint: Path) -> str | None:
    return _first_reason(folders.why_unusable(checkpoint, read=is_first_rank()))


def _first_reason(reason: str | None) -> str | None:
    return next((one for one in from_all_ranks(reason) if one is not None), None)
