"""Preprocessed arrays kept on disk, named by a hash of everything they were made from; never pickled.

Losing the cache costs time only: a file that does not read is made again, one that cannot be written is done without.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stoker.machine.cache_directory import cache_directory

__all__ = ["Arrays", "cached", "fingerprint"]

Arrays = dict[str, NDArray[np.generic]]
_FORMAT = "1"  # raised when the meaning of stored arrays changes
_MOST_BYTES = 4 << 30

log = logging.getLogger("stoker")


def fingerprint(*parts: Iterable[str] | str) -> str:
    """A hash of texts, in order; a list differs from its joined text."""
    digest = hashlib.sha256(_FORMAT.encode())
    for part in parts:
        for text in [part] if isinstance(part, str) else part:
            raw = text.encode("utf-8", errors="surrogatepass")
            digest.update(len(raw).to_bytes(8, "little"))
            digest.update(raw)
        digest.update(b"\xff" * 8)
    return digest.hexdigest()[:32]


def cached(kind: str, key: str, make: Callable[[], Arrays], *, fresh: bool = False) -> tuple[Arrays, bool]:
    """The arrays of `key`, from disk or from `make`; and whether they were there."""
    home = cache_directory()
    if home is None:
        return make(), False
    path = home / "features" / f"{kind}-{key}.npz"
    if not fresh and (found := _load(path)) is not None:
        return found, True
    arrays = make()
    _save(path, arrays)
    return arrays, False


def _load(path: Path) -> Arrays | None:
    try:
        with np.load(path, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
        os.utime(path)  # the oldest unused go first when room is needed
        return arrays
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None


def _save(path: Path, arrays: Arrays) -> None:
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
        os.replace(temporary, path)
        _make_room(path)
    except OSError as error:
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)
        log.debug("preprocessed data is not kept in %s: %s", path.parent, error)


def _make_room(newest: Path) -> None:
    files = sorted(newest.parent.glob("*.npz"), key=lambda file: file.stat().st_mtime, reverse=True)
    total = 0
    for file in files:
        total += file.stat().st_size
        if total > _MOST_BYTES and file != newest:
            file.unlink(missing_ok=True)
