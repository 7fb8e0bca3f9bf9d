"""Reads /proc and /sys below one root path, so that a recorded copy of another machine can be read like the local one.

Every reader returns None (or an empty list) for what is missing, unreadable or malformed. Nothing in this module raises.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

__all__ = ["Tree", "format_cpu_list", "parse_cpu_list", "parse_size"]

_HIGHEST_CPU = 1 << 16  # the kernel's NR_CPUS is 8192 at most; a larger number means a broken file
_LONG_NUMBER = re.compile(r"[0-9]{40,}")
_MOST_PIECES = 1024
"""Of 64 KiB; a file with more is a device."""


class Tree:
    """The files of one machine: this one for root "/", a recorded one for any other."""

    def __init__(self, root: str | os.PathLike[str] = "/") -> None:
        self.root = Path(root)
        self.live = os.path.abspath(self.root) == "/"
        self._prefix = str(self.root).rstrip("/")

    def text(self, path: str) -> str | None:
        """The contents of the file at the absolute `path`, without surrounding white space."""
        # os.open rather than open: a large machine has thousands of these files, and this takes a third of the time.
        try:
            # Non-blocking: in a copy of another machine's tree a file may be a pipe.
            handle = os.open(self._prefix + path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (OSError, ValueError):
            return None
        try:
            pieces: list[bytes] = []
            while len(pieces) < _MOST_PIECES and (piece := os.read(handle, 1 << 16)):
                pieces.append(piece)
        except OSError:
            return None
        finally:
            os.close(handle)
        return _without_odd_digits(b"".join(pieces).decode("utf-8", "replace").strip())

    def number(self, path: str) -> int | None:
        try:
            return int(self.text(path) or "")
        except ValueError:
            return None

    def cpu_list(self, path: str) -> tuple[int, ...] | None:
        text = self.text(path)
        return None if text is None else parse_cpu_list(text)

    def names(self, path: str) -> list[str]:
        """The sorted names in the directory at `path`; empty if it does not exist."""
        try:
            return sorted(os.listdir(self._prefix + path))
        except OSError:
            return []

    def has_directory(self, path: str) -> bool:
        return os.path.isdir(self._prefix + path)


def _without_odd_digits(text: str) -> str:
    """Removes digits that pass str.isdigit() but fail in int(); only broken files contain them."""
    if not text.isascii():
        text = "".join(one for one in text if one.isascii() or not one.isdigit())
    return _LONG_NUMBER.sub("?", text)


def parse_cpu_list(text: str) -> tuple[int, ...] | None:
    """The CPUs of a kernel list such as `0-3,8,10-11`; None if it is not one."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        try:
            start, end = int(first), int(last or first)
        except ValueError:
            return None
        if not 0 <= start <= end < _HIGHEST_CPU:
            return None
        cpus.update(range(start, end + 1))
    return tuple(sorted(cpus))


def format_cpu_list(numbers: Iterable[int]) -> str:
    """0, 1, 2, 5 -> `0-2,5`, as the kernel and taskset write it."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def parse_size(text: str | None) -> int | None:
    """The bytes of a size such as `48K`, `107520k`, `2M` or `4096`; None if it is not one."""
    text = (text or "").strip()
    factors = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
    factor = factors.get(text[-1:].lower())
    try:
        return int(text[:-1]) * factor if factor else int(text)
    except ValueError:
        return None
