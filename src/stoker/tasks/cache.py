"""Caches preprocessed arrays on disk, named by a hash of everything they were made from; nothing is pickled.

The cache only saves time: a file that cannot be read is made again, and failure to write one is ignored.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stoker.machine import cache_directory

__all__ = ["DIRECTORY", "Arrays", "cached", "fingerprint", "remove_old"]

Arrays = dict[str, NDArray[np.generic]]
DIRECTORY = "features"  # in the cache
_FORMAT = "1"  # increase it when the meaning of stored arrays changes
MOST_BYTES = 4 << 30
_ABANDONED = 24 * 3600.0  # seconds since a temporary file was last written
_SUFFIXES = (".npz", ".ids", ".ends", ".facts")  # of arrays, and of token_store.py

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
    """The arrays of `key`, from disk or else from `make`; and whether they came from disk."""
    name = f"{kind}-{key}.npz"
    if not fresh and (found := _load(name)) is not None:
        return found, True
    arrays = make()
    _save(name, arrays)
    return arrays, False


def _load(name: str) -> Arrays | None:
    try:
        with cache_directory.open_file(cache_directory.trusted_directory(DIRECTORY) / name) as file:
            with np.load(file, allow_pickle=False) as stored:
                arrays = {name: stored[name] for name in stored.files}
            os.utime(file.fileno())  # the least recently used are removed first
        return arrays
    except cache_directory.UntrustedCache as error:
        cache_directory.warn(error)
        return None
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None


def _save(name: str, arrays: Arrays) -> None:
    try:
        path = cache_directory.make_directory(DIRECTORY) / name
        with cache_directory.writing(path) as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
        remove_old(path)
    except OSError as error:
        log.debug("preprocessed data is not cached: %s", error)


def remove_old(newest: Path) -> None:
    """Removes what was not used for the longest time, until the cache is small enough; files with the name of `newest` stay.

    Temporary files that a killed process has left are removed, too.
    """
    files = [file for file in newest.parent.iterdir() if file.suffix in _SUFFIXES]
    for file in newest.parent.glob(".*"):
        if time.time() - file.stat().st_mtime > _ABANDONED:
            file.unlink(missing_ok=True)
    total = 0
    for file in sorted(files, key=lambda file: file.stat().st_mtime, reverse=True):
        total += file.stat().st_size
        if total > MOST_BYTES and file.stem != newest.stem:
            file.unlink(missing_ok=True)
