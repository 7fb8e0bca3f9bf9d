"""Checkpoint folders that are complete or absent: written beside, made durable, then renamed into place.

The layout is transformers' own (checkpoint-<step>). Folders that are being written or deleted have names that neither
transformers nor a person takes for a checkpoint, so a kill at any byte leaves the last good one. Imports no torch, because
the launcher uses it too.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import re
import resource
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from stoker.errors import UserError
from stoker.hf.checkpointing import manifest
from stoker.whole_files import remove_unfinished

__all__ = ["all_checkpoints", "candidates", "disk_is_full", "full_disk_as_user_error", "last_good", "publish", "publish_staged",
           "put_in_place", "remove_all", "rotate", "seal_again", "shortage", "staging", "tidy", "warn_of_skipped",
           "why_unusable"]  # fmt: skip

_NAME = re.compile(r"checkpoint-(\d+)")
_PARTIAL, _REPLACED, _DOOMED = ".partial", ".replaced", ".deleting"
_ASIDE = re.compile(r"\.(checkpoint-\d+)(\.partial|\.replaced|\.deleting)")
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "adapter_model.safetensors",
            "pytorch_model.bin", "pytorch_model.bin.index.json", "adapter_model.bin")  # fmt: skip

log = logging.getLogger("stoker")


def staging(folder: Path, step: int) -> Path:
    """The folder in which checkpoint-<step> of `folder` is written."""
    return folder / f".checkpoint-{step}{_PARTIAL}"


def publish(written: Path, target: Path) -> None:
    """Adds a manifest to the folder `written` and renames it to `target`; at no time is a partial folder there."""
    _seal(written)
    aside = target.parent / f".{target.name}{_REPLACED}"
    if target.exists():
        # A folder cannot be renamed over a full one. After a kill between the two renames, `tidy` restores the old one.
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(target, aside)
    os.rename(written, target)
    manifest.remember(target)
    _sync(target.parent)
    shutil.rmtree(aside, ignore_errors=True)


def publish_staged(staged: Path, target: Path) -> None:
    """Publishes the checkpoint that was written in the folder `staged`."""
    # Machines that share the folder find this done by rank 0; on the others it holds the files of their own ranks.
    if (staged / target.name).exists():
        publish(staged / target.name, target)
        shutil.rmtree(staged, ignore_errors=True)


def _seal(folder: Path) -> None:
    # Checksums are computed while the disk writes, and are ready first.
    with manifest.measured_during(folder) as entries:
        make_durable(folder)
    manifest.write(folder, entries())
    _sync(folder)


def seal_again(checkpoint: Path) -> None:
    """Rewrites the manifest if a callback has changed the files of a checkpoint after it was published."""
    if checkpoint.is_dir() and not manifest.is_current(checkpoint):
        _seal(checkpoint)
        manifest.remember(checkpoint)


def make_durable(folder: Path) -> None:
    """Waits until everything below `folder` is on the disk: a rename may otherwise outlive what it renamed."""
    for where, _, names in os.walk(folder):
        for name in names:
            _sync(Path(where) / name)
        _sync(Path(where))


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):  # not supported by some network file systems
            raise
    finally:
        os.close(handle)


def put_in_place(folder: Path, write: Callable[[Path], None]) -> None:
    """Lets `write` fill a temporary folder, then renames its files over those of `folder` one by one."""
    beside = folder / ".model.partial"
    shutil.rmtree(beside, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        write(beside)
        make_durable(beside)
        for path in sorted(beside.rglob("*")):
            target = folder / path.relative_to(beside)
            if path.is_dir():
                target.mkdir(exist_ok=True)
            else:
                os.replace(path, target)
        _sync(folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def tidy(folder: Path) -> None:
    """Deletes what a killed run left unfinished, and restores what it was about to replace."""
    if not folder.is_dir():
        return
    shutil.rmtree(folder / ".model.partial", ignore_errors=True)
    remove_unfinished(folder)
    for checkpoint in all_checkpoints(folder):
        remove_unfinished(checkpoint)
    for path in list(folder.iterdir()):
        match = _ASIDE.fullmatch(path.name)
        if not match or not path.is_dir():
            continue
        target = folder / match[1]
        if match[2] == _REPLACED and not target.exists():
            os.rename(path, target)
        else:
            shutil.rmtree(path, ignore_errors=True)


def step_of(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else -1


def all_checkpoints(folder: Path) -> list[Path]:
    """Checkpoint folders, the fewest steps first."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=step_of)


def why_unusable(checkpoint: Path, *, read: bool = True) -> str | None:
    """Why a run cannot resume from this folder; None if it can. Without `read`, sizes are compared, but not contents."""
    if not checkpoint.is_dir():
        return "it does not exist"
    try:
        state = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
        if not isinstance(state, dict) or not isinstance(state.get("global_step"), int):
            return "its trainer_state.json names no step"
    except FileNotFoundError:
        return "it has no trainer_state.json"
    except (OSError, ValueError, RecursionError) as error:
        return f"its trainer_state.json cannot be read ({error})"
    damage = manifest.why_damaged(checkpoint, read=read)
    if damage is not None:
        return damage
    if not any((checkpoint / name).is_file() for name in _WEIGHTS):
        return "it has no weights"
    if not (checkpoint / "optimizer.pt").is_file() or not (checkpoint / "scheduler.pt").is_file():
        return "it has no optimizer state (was it saved with save_only_model?)"
    return None


def candidates(folder: Path, since: float | None = None) -> list[Path]:
    """The checkpoints written after `since`, those with most steps first."""
    found = reversed(all_checkpoints(folder))
    return [checkpoint for checkpoint in found if since is None or _written(checkpoint) > since]


def last_good(folder: Path, since: float | None = None) -> Path | None:
    """The usable checkpoint with most steps, of those written after `since`; logs which are skipped."""
    for checkpoint in candidates(folder, since):
        reason = why_unusable(checkpoint)
        if reason is None:
            return checkpoint
        warn_of_skipped(checkpoint, reason)
    return None


def warn_of_skipped(checkpoint: Path, reason: str) -> None:
    log.warning("%s is skipped because it cannot be resumed from: %s", checkpoint, reason)


def _written(checkpoint: Path) -> float:
    try:
        return (checkpoint / "trainer_state.json").stat().st_mtime
    except OSError:
        return 0.0


def rotate(folder: Path, limit: int | None, keep: Iterable[Path]) -> None:
    """Deletes the oldest checkpoints beyond `limit`, never one of `keep`."""
    if limit is None or limit <= 0:
        return
    kept = {path.resolve() for path in keep}
    # By time, not by step: in a folder that was used before, the old run may have taken more steps than this one.
    found = sorted(all_checkpoints(folder), key=lambda path: (path.stat().st_mtime_ns, step_of(path)))
    excess = len(found) - max(limit, len(kept))
    for checkpoint in found:
        if excess <= 0:
            return
        if checkpoint.resolve() not in kept:
            remove(checkpoint)
            excess -= 1


def remove(checkpoint: Path) -> None:
    """Deletes a checkpoint; renamed first, so that a kill halfway leaves no folder that looks complete."""
    doomed = checkpoint.parent / f".{checkpoint.name}{_DOOMED}"
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(checkpoint, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def remove_all(folder: Path) -> None:
    for checkpoint in all_checkpoints(folder):
        remove(checkpoint)


@contextlib.contextmanager
def full_disk_as_user_error(folder: Path, target: Path, needed: int) -> Iterator[None]:
    """Around writing `needed` bytes for `target` into `folder`: a full disk becomes a UserError that says what is kept."""
    try:
        yield
    except Exception as error:
        if disk_is_full(error, folder, needed):
            raise UserError(_disk_full_message(folder, target)) from None
        raise


def disk_is_full(error: BaseException, folder: Path, needed: int) -> bool:
    """Whether `error` was caused by a full disk or a file size limit; each library reports that in its own way."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return True
        if re.search(r"No space left on device|Disk quota exceeded|File too large", str(seen)):
            return True
        # torch's file writer reports only that it failed, so the free space decides.
        if isinstance(seen, RuntimeError) and re.search(r"inline_container|StreamWriter|file write", str(seen)):
            return min(shutil.disk_usage(folder).free, _largest_file()) < needed
        seen = seen.__cause__ or seen.__context__
    return False


def _largest_file() -> float:
    """The size limit of a file in bytes (`ulimit -f`)."""
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return math.inf if most == resource.RLIM_INFINITY else most


def _limited_by_file_size(folder: Path) -> bool:
    return _largest_file() < shutil.disk_usage(folder).free


def shortage(folder: Path, what: str) -> str:
    """Says that `what` could not be written into `folder`, and which of the two limits is to blame."""
    if _limited_by_file_size(folder):
        return f"{what} could not be written: the size limit of a file is {_largest_file() / 1e6:,.1f} MB (ulimit -f)"
    return f"the disk of {folder} is full ({shutil.disk_usage(folder).free / 1e6:,.0f} MB left): {what} could not be written"


def _disk_full_message(folder: Path, target: Path) -> str:
    last = last_good(folder)
    kept = f"{last} is the last good checkpoint, and complete" if last else "there is no earlier checkpoint"
    advice = "Raise that limit" if _limited_by_file_size(folder) else "Make room, or use --save_total_limit"
    return f"{shortage(folder, target.name)}; {kept}. {advice}, then resume"
