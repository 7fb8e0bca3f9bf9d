"""The user's cache directory: measurements, tokenized data and compiled backends, accessible only to the user.

$STOKER_CACHE_DIR, else $XDG_CACHE_HOME/stoker, else ~/.cache/stoker. The cache only saves time, so a broken file counts as
missing, and so does one that somebody else could have written. Files are written atomically. Callers report a directory
that cannot be written.
"""

from __future__ import annotations

import errno
import functools
import grp
import json
import logging
import os
import pwd
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

__all__ = [
    "UntrustedCache", "cache_directory", "check_file", "check_installed", "load", "make_directory", "open_file", "save",
    "trusted_directory", "warn",
    "writing",
]  # fmt: skip

log = logging.getLogger("stoker")

warned: set[str] = set()


class UntrustedCache(PermissionError):
    """Somebody else could have written this file or directory; `strerror` says why and what to do."""

    def __init__(self, reason: str) -> None:
        super().__init__(errno.EPERM, reason)

    def __str__(self) -> str:
        return str(self.strerror)


def cache_directory() -> Path | None:
    """The path of the cache, whether it exists or not; None if the user has no home directory."""
    if chosen := os.environ.get("STOKER_CACHE_DIR"):
        return Path(chosen)
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(xdg):  # the XDG specification says to ignore a relative one
        return Path(xdg) / "stoker"
    try:
        return Path.home() / ".cache" / "stoker"
    except RuntimeError:
        return None


def trusted_directory(inside: str = "") -> Path:
    """The cache directory, or its subdirectory `inside`, with symbolic links resolved.

    Raises UntrustedCache if anybody but the user (and root) could change what is in it, OSError if it is missing.
    """
    directory = _trusted(_location())
    return _trusted(directory / inside) if inside else directory


def _trusted(directory: Path) -> Path:
    # Links may change later, so the resolved path that was checked is the one that is returned.
    real = Path(os.path.realpath(directory))
    for parent in reversed(real.parents):
        _check_parent(parent, real)
    status = os.lstat(real)
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(directory))
    if status.st_uid != os.geteuid():
        raise _untrusted(
            real, f"it belongs to {_user(status.st_uid)}", "set STOKER_CACHE_DIR to a directory of your own"
        )
    if _others_write(real, status):
        raise _untrusted(real, f"others may write to it (mode {_mode(status)})", f"run `chmod 700 {real}`")
    return real


def make_directory(inside: str = "") -> Path:
    """As `trusted_directory`, but creates what is missing, accessible only to the user."""
    chosen = Path(os.path.abspath(_location()))
    _make(chosen / inside)
    directory = trusted_directory(inside)
    if not os.environ.get("STOKER_CACHE_DIR") and not chosen.is_symlink():
        os.chmod(chosen, 0o700)  # the default location is private
    return directory


def check_file(path: Path) -> None:
    """Raises UntrustedCache unless `path` is a regular file that only the user may write, OSError if it is missing."""
    _check_status(path, os.lstat(path))


def check_installed(path: Path) -> None:
    """As `check_file`, for a file of an installed package: it may also belong to root, or to whoever installed Stoker."""
    owners = (0, os.geteuid(), os.stat(__file__).st_uid)
    directory = os.lstat(path.parent)
    status = os.lstat(path)
    if directory.st_uid not in owners or _others_write(path.parent, directory):
        raise _untrusted(path, f"others may write to {path.parent}", f"run `chmod go-w {path.parent}`")
    _check_status(path, status, owners)


def open_file(path: Path, *, make: bool = False) -> IO[bytes]:
    """Opens a file of a trusted directory, for reading, or for both with `make`; symbolic links are not followed.

    Raises as `check_file` does.
    """
    access = os.O_RDWR | os.O_CREAT if make else os.O_RDONLY
    try:
        # non-blocking: opening a pipe of this name must not block
        descriptor = os.open(path, access | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _untrusted(path, "it is a symbolic link", "remove it") from None
        raise
    try:
        _check_status(path, os.fstat(descriptor))
        return os.fdopen(descriptor, "r+b" if make else "rb")
    except BaseException:
        os.close(descriptor)
        raise


@contextmanager
def writing(path: Path) -> Iterator[IO[bytes]]:
    """A temporary file, accessible only to the user, that replaces `path` when it is complete."""
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def load(name: str) -> dict[str, Any] | None:
    """The contents of the JSON file `name`; None if it is missing, unreadable, untrusted or not a JSON object."""
    try:
        with open_file(trusted_directory() / name) as file:
            data = json.load(file)
    except UntrustedCache as error:
        warn(error)
        return None
    except (OSError, ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def save(name: str, data: dict[str, Any]) -> None:
    """Writes the JSON file `name` atomically. Raises OSError with a reason if that is not possible."""
    with writing(make_directory() / name) as file:
        file.write(json.dumps(data, indent=1).encode())


def warn(error: UntrustedCache) -> None:
    """Logs the reason, once per process."""
    if str(error) not in warned:
        warned.add(str(error))
        log.warning("%s", error)


def _location() -> Path:
    directory = cache_directory()
    if directory is None:
        raise OSError("there is no home directory; set STOKER_CACHE_DIR")
    return directory


def _make(directory: Path) -> None:
    if not directory.is_dir():
        _make(directory.parent)  # one by one: mkdir(parents=True) applies the mode to the last one only
        directory.mkdir(mode=0o700, exist_ok=True)


def _check_parent(parent: Path, directory: Path) -> None:
    """Whoever can write to a directory can rename its entries, unless the directory is sticky, like /tmp."""
    status = os.lstat(parent)
    advice = "set STOKER_CACHE_DIR to a directory in your home"
    if status.st_uid not in (0, os.geteuid()) and not _unmapped(status.st_uid):
        raise _untrusted(directory, f"{parent} belongs to {_user(status.st_uid)}, who could replace it", advice)
    if not status.st_mode & stat.S_ISVTX and _others_write(parent, status):
        raise _untrusted(
            directory, f"others may write to {parent} (mode {_mode(status)}) and could replace it",
            f"run `chmod go-w {parent}`, or {advice}",
        )  # fmt: skip


def _check_status(path: Path, status: os.stat_result, owners: tuple[int, ...] = ()) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise _untrusted(path, "it is not a regular file", "remove it")
    if status.st_uid not in (owners or (os.geteuid(),)):
        raise _untrusted(path, f"it belongs to {_user(status.st_uid)}", "remove it")
    if _others_write(path, status):
        raise _untrusted(path, f"others may write to it (mode {_mode(status)})", "remove it")


def _others_write(path: Path, status: os.stat_result) -> bool:
    if status.st_mode & stat.S_IWOTH:
        return True
    if not status.st_mode & stat.S_IWGRP:
        return False
    # An access control list that grants write access shows in the group bits.
    return not group_of_one(status.st_gid) or "system.posix_acl_access" in extended_attributes(path)


def extended_attributes(path: Path) -> list[str]:
    try:
        return os.listxattr(path, follow_symlinks=False)
    except OSError:  # not supported by this file system
        return []


@functools.cache
def group_of_one(gid: int) -> bool:
    """Whether this is the user's private group. Systems with such groups use umask 002, which makes all files group-writable."""
    try:
        group, user = grp.getgrgid(gid), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    return gid == user.pw_gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


@functools.cache
def _unmapped(uid: int) -> bool:
    """Whether this is the overflow uid, which a container shows for owners outside its user namespace, usually root."""
    try:
        ranges = [list(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()]
        return uid == int(Path("/proc/sys/kernel/overflowuid").read_text()) and not any(
            first <= uid < first + count for first, _, count in ranges
        )
    except (OSError, ValueError):
        return False


def _untrusted(path: Path, reason: str, advice: str) -> UntrustedCache:
    return UntrustedCache(f"{path} is not used: {reason}; {advice}")


def _user(uid: int) -> str:
    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"user {uid}"


def _mode(status: os.stat_result) -> str:
    return format(stat.S_IMODE(status.st_mode), "04o")
