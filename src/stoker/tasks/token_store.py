"""Tokens on disk: written as they come, read by memory mapping, so that data sets may be larger than the memory.

Stored in the cache as three files, named by a hash of what the tokens were made from: the ids of all texts one after the other,
where each text ends, and a few facts, which are written last. If the cache cannot be written, the tokens are in temporary files
that the system removes when the process ends.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from stoker.errors import UserError
from stoker.machine import cache_directory
from stoker.tasks.cache import DIRECTORY, remove_old

__all__ = ["StoredTokens", "stored"]

log = logging.getLogger("stoker")

_ENDS = np.dtype(np.int64)


@dataclass(frozen=True)
class StoredTokens:
    ids: NDArray[Any]
    """The tokens of all texts, one after the other."""
    ends: NDArray[np.int64]
    """The end of each text."""
    facts: dict[str, Any]
    """What the maker of the tokens had to say."""


Batch = tuple[NDArray[Any], NDArray[np.int64]]
"""Token ids of some texts, one after the other, and the number of tokens of each."""


def stored(
    kind: str,
    key: str,
    make: Callable[[], Iterable[Batch]],
    facts: Callable[[], dict[str, Any]],
    *,
    fresh: bool = False,
) -> StoredTokens:
    """The tokens of `key`, from the cache or else from `make`; `facts` is called when all are made."""
    if not fresh and (found := _load(f"{kind}-{key}")) is not None:
        return found
    try:
        directory = cache_directory.make_directory(DIRECTORY)
    except OSError as error:
        log.debug("tokens are not cached: %s", error)
        return _temporary(make, facts)
    path = directory / f"{kind}-{key}"
    try:
        with ExitStack() as files:
            ids, ends = (files.enter_context(cache_directory.writing(path.with_suffix(s))) for s in (".ids", ".ends"))
            dtype = _write(make(), ids, ends)
        with cache_directory.writing(path.with_suffix(".facts")) as file:
            file.write(json.dumps({"dtype": dtype.name, "facts": facts()}).encode())
        with suppress(OSError):  # another process may be removing the same files
            remove_old(path.with_suffix(".facts"))
    except OSError as error:
        log.warning("the tokenized texts cannot be kept in %s: %s; they are made again for every run", directory,
                    error.strerror or error)  # fmt: skip
        return _temporary(make, facts)
    found = _load(path.name)
    return _temporary(make, facts) if found is None else found


def _write(batches: Iterable[Batch], ids: IO[bytes], ends: IO[bytes]) -> np.dtype[Any]:
    end, dtype = 0, np.dtype(np.uint16)
    for values, lengths in batches:
        dtype = values.dtype
        ids.write(np.ascontiguousarray(values).data)
        ends.write((np.cumsum(lengths, dtype=_ENDS) + end).data)
        end += len(values)
    return dtype


def _load(name: str) -> StoredTokens | None:
    try:
        path = cache_directory.trusted_directory(DIRECTORY) / name
        with cache_directory.open_file(path.with_suffix(".facts")) as file:
            about = json.load(file)
            os.utime(file.fileno())  # the least recently used are removed first
        arrays = []
        for suffix, dtype in ((".ids", np.dtype(about["dtype"])), (".ends", _ENDS)):
            with cache_directory.open_file(path.with_suffix(suffix)) as file:
                os.utime(file.fileno())
                arrays.append(_mapped(file, dtype))
        ids, ends = arrays
        return StoredTokens(ids, ends, dict(about["facts"])) if len(ends) and int(ends[-1]) == len(ids) else None
    except cache_directory.UntrustedCache as error:
        cache_directory.warn(error)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass
    return None


def _mapped(file: IO[bytes], dtype: np.dtype[Any]) -> NDArray[Any]:
    if os.fstat(file.fileno()).st_size == 0:  # cannot be mapped
        return np.empty(0, dtype)
    return np.memmap(file, dtype, "r")  # type: ignore[call-overload, no-any-return]


def _temporary(make: Callable[[], Iterable[Batch]], facts: Callable[[], dict[str, Any]]) -> StoredTokens:
    try:
        with tempfile.TemporaryFile() as ids, tempfile.TemporaryFile() as ends:
            dtype = _write(make(), ids, ends)
            ids.flush()
            ends.flush()
            return StoredTokens(_mapped(ids, dtype), _mapped(ends, _ENDS), facts())
    except OSError as error:
        raise UserError(
            f"the tokenized texts cannot be stored: {error.strerror or error}; set STOKER_CACHE_DIR or TMPDIR to a folder with "
            "room for about as many bytes as the texts have"
        ) from None
