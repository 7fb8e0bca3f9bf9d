"""Checkpoint folders that are whole or not there: written beside, made durable, then renamed into place.

The layout is transformers' own (checkpoint-<step>). Folders under construction or being deleted have names that neither
transformers nor a person takes for a checkpoint, so a kill at any byte leaves the last good one.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import re
import resource
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from stoker.hf.checkpointing import manifest
from stoker.whole_files import remove_unfinished

__all__ = [
    "all_checkpoints",
    "candidates",
    "disk_full_sentence",
    "disk_is_full",
    "last_good",
    "publish",
    "put_in_place",
    "remove_all",
    "rotate",
    "seal_again",
    "staging",
    "tidy",
    "warn_of_skipped",
    "why_unusable",
]

_NAME = re.compile(r"checkpoint-(\d+)")
_PARTIAL, _REPLACED, _DOOMED = ".partial", ".replaced", ".deleting"
_ASIDE = re.compile(r"\.(checkpoint-\d+)(\.partial|\.replaced|\.deleting)")
_WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "adapter_model.safetensors",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "adapter_model.bin",
)

log = logging.getLogger("stoker")


def staging(folder: Path, step: int) -> Path:
    """Where checkpoint-<step> of `folder` is written before it counts."""
    return folder / f".checkpoint-{step}{_PARTIAL}"


def publish(written: Path, target: Path) -> None:
    """Seals the folder `written` by a manifest and puts it at `target`; at no moment is a half-written folder there."""
    _seal(written)
    aside = target.parent / f".{target.name}{_REPLACED}"
    if target.exists():
        # A folder cannot be renamed over a full one. Killed between the two renames, `tidy` gives the old one back.
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(target, aside)
    os.rename(written, target)
    manifest.remember(target)
    _sync(target.parent)
    shutil.rmtree(aside, ignore_errors=True)


def _seal(folder: Path) -> None:
    # The checksums are ready before a disk has taken the bytes.
    with manifest.measured_during(folder) as entries:
        make_durable(folder)
    manifest.write(folder, entries())
    _sync(folder)


def seal_again(checkpoint: Path) -> None:
    """Makes the manifest anew if somebody's callback has changed the files of a checkpoint after it was published."""
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
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):  # some network file systems cannot
            raise
    finally:
        os.close(handle)


def put_in_place(folder: Path, write: Callable[[Path], None]) -> None:
    """Lets `write` fill a folder beside, then moves its files over those of `folder` one by one, each by a rename."""
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
    """Clears away what a killed run left unfinished, and gives back what it was about to replace."""
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
    """What keeps a folder from being resumed from; None if nothing. Without `read`, sizes are compared, but no contents."""
    if not checkpoint.is_dir():
        return "it is not there"
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
    """The checkpoint with most steps that can be resumed from, of those written after `since`; those that cannot are named."""
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
    # By time, not by step: in a folder that was used before, the old run's last step may be larger than ours.
    found = sorted(all_checkpoints(folder), key=lambda path: (path.stat().st_mtime_ns, step_of(path)))
    excess = len(found) - max(limit, len(kept))
    for checkpoint in found:
        if excess <= 0:
            return
        if checkpoint.resolve() not in kept:
            remove(checkpoint)
            excess -= 1


def remove(checkpoint: Path) -> None:
    """Deletes a checkpoint; renamed first, so that a kill halfway leaves no folder that looks whole."""
    doomed = checkpoint.parent / f".{checkpoint.name}{_DOOMED}"
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(checkpoint, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def remove_all(folder: Path) -> None:
    for checkpoint in all_checkpoints(folder):
        remove(checkpoint)


def disk_is_full(error: BaseException, folder: Path, needed: int) -> bool:
    """Whether `error` comes from a full disk or a limit on files; the libraries below report it in their own ways."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return True
        if re.search(r"No space left on device|Disk quota exceeded|File too large", str(seen)):
            return True
        # torch's file writer only says that it failed; whether there was room has to be looked up.
        if isinstance(seen, RuntimeError) and re.search(r"inline_container|StreamWriter|file write", str(seen)):
            return min(shutil.disk_usage(folder).free, _largest_file()) < needed
        seen = seen.__cause__ or seen.__context__
    return False


def _largest_file() -> float:
    """Bytes that one file may hold, by `ulimit -f`."""
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return math.inf if most == resource.RLIM_INFINITY else most


def disk_full_sentence(folder: Path, target: Path) -> str:
    """What was not written, and what is kept."""
    free, most = shutil.disk_usage(folder).free / 1e6, _largest_file() / 1e6
    last = last_good(folder)
    kept = f"{last} is the last good checkpoint, and whole" if last else "there is no earlier checkpoint"
    if most < free:
        return (
            f"{target.name} could not be written: files may hold at most {most:,.1f} MB here (ulimit -f); {kept}. Raise that "
            "limit, then resume"
        )
    return (
        f"the disk of {folder} is full ({free:,.0f} MB left): {target.name} could not be written; {kept}. "
        "Make room, or use --save_total_limit, then resume"
    )
