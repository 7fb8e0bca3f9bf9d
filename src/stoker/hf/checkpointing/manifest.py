"""Whether a checkpoint is intact: each has a manifest with the sizes and CRC-32 checksums of its files, written last.

In a checkpoint without one (stock transformers, an older Stoker) the structure is checked: headers and sizes of safetensors
files, directories and checksums of the zip archives that torch.save writes. Only the standard library is used, because the
launcher needs this too. The checksums detect damage, not tampering.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

__all__ = ["NAME", "Entries", "is_current", "measured_during", "remember", "why_damaged", "write"]

NAME = "stoker_manifest.json"
PARTIAL = f".{NAME}.partial"

Entries = dict[str, dict[str, Any]]
"""By path within the checkpoint: {"size": bytes, "crc32": [eight hex digits for each block]}."""

_BLOCK = 64 << 20
"""Bytes per checksum: the blocks of one file are read by several threads."""
_CHUNK = 1 << 20
_THREADS = min(8, os.cpu_count() or 1)
_LONGEST_HEADER = 100_000_000  # the limit of the safetensors format

_RESUMED = re.compile(r"(?!training_args\.bin$).*\.(safetensors|pt|pth|bin|distcp)|.*\.index\.json|adapter_config\.json"
                      r"|trainer_state\.json|stoker_run\.json")  # fmt: skip
"""Files that resuming reads. Users may change or delete the others (model card, tokenizer)."""
_WEIGHTS = re.compile(r"(.*/)?(model|adapter_model|pytorch_model)\b.*\.(safetensors|bin|index\.json)")

_Signature = tuple[tuple[str, int, int, int, int], ...]
_KNOWN_INTACT: dict[Path, _Signature] = {}
"""A cache: folders whose checksums were correct, with the state of their files at that time."""


@contextlib.contextmanager
def measured_during(folder: Path) -> Iterator[Callable[[], Entries]]:
    """Computes checksums of all files in threads while the caller waits for the disk; yields a function that returns them."""
    sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in _files(folder)}
    with ThreadPoolExecutor(_THREADS) as pool:
        pending = {name: _submit(pool, folder / name, size) for name, size in sorted(sizes.items())}
        yield lambda: {
            name: {"size": sizes[name], "crc32": [one.result() for one in blocks]} for name, blocks in pending.items()
        }


def write(folder: Path, entries: Entries) -> None:
    """Writes the manifest to the disk, then renames it into place."""
    beside = folder / PARTIAL
    with open(beside, "w", encoding="utf-8") as file:
        json.dump({"version": 1, "files": entries}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, folder / NAME)


def remember(folder: Path) -> None:
    """Caches `folder` as intact: its manifest has just been made from its files."""
    with contextlib.suppress(OSError, ValueError):
        _KNOWN_INTACT[folder.absolute()] = _signature(folder, list(_read(folder) or ()))


def is_current(folder: Path) -> bool:
    """Whether no file of `folder` that resuming reads was changed, added or removed since `remember`."""
    before = _KNOWN_INTACT.get(folder.absolute())
    names = [path.relative_to(folder).as_posix() for path in _files(folder)]
    return before is not None and before == _signature(folder, names)


def why_damaged(folder: Path, *, read: bool = True, weights_only: bool = False) -> str | None:
    """What is wrong with the files of a checkpoint; None if nothing. Without `read`, contents are not read."""
    wanted = _WEIGHTS if weights_only else _RESUMED
    try:
        entries = _read(folder)
    except (OSError, ValueError, RecursionError) as error:
        return f"its {NAME} cannot be read ({error})"
    if entries is None:
        return _structure(folder, wanted, read)
    listed = {name: entry for name, entry in entries.items() if wanted.fullmatch(name)}
    return _compare(folder, listed, read)


def _read(folder: Path) -> Entries | None:
    """The files that a manifest lists; None without a manifest, ValueError if it is not one."""
    try:
        content = json.loads((folder / NAME).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    files = content.get("files") if isinstance(content, dict) else None
    if not isinstance(files, dict) or not all(_is_entry(name, entry) for name, entry in files.items()):
        raise ValueError("it lists no files")
    return files


def _is_entry(name: str, entry: Any) -> bool:
    path = PurePosixPath(name)
    inside = not path.is_absolute() and ".." not in path.parts and "\0" not in name
    return (
        inside
        and isinstance(entry, dict)
        and isinstance(entry.get("size"), int)
        and isinstance(entry.get("crc32"), list)
    )


def _compare(folder: Path, entries: Entries, read: bool) -> str | None:
    for name, entry in entries.items():
        try:
            found = (folder / name).stat()
        except OSError:
            return f"{name} is missing"
        if not stat.S_ISREG(found.st_mode):
            return f"{name} is not a file"
        if found.st_size != entry["size"]:
            return f"{name} has {found.st_size:,} bytes instead of {entry['size']:,}"
    if not read:
        return None
    key, now = folder.absolute(), _signature(folder, list(entries))
    if set(now) <= set(_KNOWN_INTACT.get(key, ())):
        return None
    with ThreadPoolExecutor(_THREADS) as pool:
        pending = {name: _submit(pool, folder / name, entry["size"]) for name, entry in entries.items()}
        for name, blocks in pending.items():
            if reason := _wrong_content(blocks, entries[name]["crc32"]):
                pool.shutdown(cancel_futures=True)
                return f"{name} {reason}"
    _KNOWN_INTACT[key] = now
    return None


def _wrong_content(blocks: list[Future[str]], expected: list[Any]) -> str | None:
    try:
        right = [one.result() for one in blocks] == expected
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return None if right else f"does not match its checksum in {NAME}: it was changed or damaged after it was written"


def _submit(pool: ThreadPoolExecutor, path: Path, size: int) -> list[Future[str]]:
    return [pool.submit(_checksum, path, start) for start in range(0, size, _BLOCK)]


def _checksum(path: Path, start: int) -> str:
    # The fastest of the functions in zlib and hashlib (docs/reliability.md). It releases the GIL.
    value, left, buffer = 0, _BLOCK, bytearray(_CHUNK)
    view = memoryview(buffer)
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        while left and (count := file.readinto(view[:left])):
            value = zlib.crc32(view[:count], value)
            left -= count
    return f"{value:08x}"


def _files(folder: Path) -> Iterator[Path]:
    for where, _, names in os.walk(folder):
        for name in names:
            path = Path(where) / name
            if name not in (NAME, PARTIAL) and path.is_file():
                yield path


def _signature(folder: Path, names: list[str]) -> _Signature:
    found = []
    for name in sorted(name for name in names if _RESUMED.fullmatch(name)):
        one = (folder / name).stat()
        found.append((name, one.st_size, one.st_mtime_ns, one.st_ctime_ns, one.st_ino))
    return tuple(found)


# Without a manifest


def _structure(folder: Path, wanted: re.Pattern[str], read: bool) -> str | None:
    names = sorted(path.relative_to(folder).as_posix() for path in _files(folder))
    for name in names:
        if wanted.fullmatch(name) and (wrong := _wrong_structure(folder / name, read)):
            return f"{name} {wrong}"
    return None


def _wrong_structure(path: Path, read: bool) -> str | None:
    try:
        if path.stat().st_size == 0:
            return "is empty"
        if path.name.endswith(".index.json"):
            return _wrong_index(path)
        if path.suffix == ".safetensors":
            return _wrong_safetensors(path)
        return _wrong_archive(path, read) if path.suffix in (".pt", ".pth", ".bin") else None
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def _wrong_index(path: Path) -> str | None:
    try:
        shards = set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return "is damaged: it names no files of weights"
    missing = sorted(str(name) for name in shards if not (path.parent / str(name)).is_file())
    return f"names {missing[0]}, which is missing" if missing else None


def _wrong_safetensors(path: Path) -> str | None:
    """Eight bytes with the length of the header, the header, then the tensors up to the last byte of the file."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(size - 8, _LONGEST_HEADER):
            return "is damaged: its header is truncated"
        try:
            header: Mapping[str, Any] = json.loads(file.read(length))
            ends = [int(one["data_offsets"][1]) for name, one in header.items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
            return "is damaged: its header is not a safetensors header"
    expected = 8 + length + max(ends, default=0)
    return None if size == expected else f"is damaged: it has {size:,} bytes instead of {expected:,}"


def _wrong_archive(path: Path, read: bool) -> str | None:
    with open(path, "rb") as file:
        start = file.read(2)
    if start[:1] == b"\x80":  # a bare pickle, as torch wrote before version 1.6; it has no checksums
        return None
    try:
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist() if read else ():
                if info.CRC:  # torch.serialization.set_crc32_options(False) leaves it at 0
                    _read_through(archive, info)
    except OSError:
        raise
    except Exception as error:  # a damaged archive makes zipfile raise many kinds
        return f"is damaged: {error}"
    return None


def _read_through(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> None:
    with archive.open(info) as file:
        while file.read(_CHUNK):
            pass
